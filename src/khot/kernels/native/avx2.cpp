// Compiled with -mavx2 -mfma; run only where the machine has both.
#define KHOT_X86
#define FLOAT_TABLE avx2_float
#define DOUBLE_TABLE avx2_double
#include "kernels.inc"
