import dev.flare.*
import java.nio.file.*
import java.util.*
