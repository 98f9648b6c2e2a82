// Does not compile: the function that it calls does not exist.
__global__ void call_nothing(float* out) { out[threadIdx.x] = no_such_function(threadIdx.x); }
