#define FLOAT Scalar<float>
#define DOUBLE Scalar<double>
#define FLOAT_TABLE portable_float
#define DOUBLE_TABLE portable_double
#include "kernels.inc"
