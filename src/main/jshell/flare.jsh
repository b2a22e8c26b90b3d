import dev.flare.*
import static dev.flare.DType.*
import static dev.flare.FlashAttention.flash
import java.nio.file.*
import java.util.*
