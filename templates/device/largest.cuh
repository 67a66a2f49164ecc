// The largest finite number of a storage type.
__device__ inline float largest(float) { return 3.40282347e+38f; }
__device__ inline float largest(__half) { return 65504.0f; }
__device__ inline float largest(__nv_bfloat16) { return 3.38953139e+38f; }
