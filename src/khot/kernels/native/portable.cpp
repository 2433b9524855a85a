// For the least that the compiler may take for granted: SSE2, NEON, or neither.
#define FLOAT_TABLE portable_float
#define DOUBLE_TABLE portable_double
#include "kernels.inc"
