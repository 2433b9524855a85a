// Compiled with -mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma; run only where the machine has them all.
#define KHOT_X86
#define FLOAT_TABLE avx512_float
#define DOUBLE_TABLE avx512_double
#include "kernels.inc"
