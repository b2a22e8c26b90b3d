// Compiled with AVX2, FMA and F16C; called only where the processor has them.
#define FLARE_CPU_ISA_AVX2
#include "kernels.inl"
