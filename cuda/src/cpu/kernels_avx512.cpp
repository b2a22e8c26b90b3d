// Compiled with AVX-512 F, BW, DQ and VL; called only where the processor has them.
#define FLARE_CPU_ISA_AVX512
#include "kernels.inl"
