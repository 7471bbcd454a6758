// KDTREE_BOTH: a function for host and device.
#pragma once

#ifdef __CUDACC__
#define KDTREE_BOTH __host__ __device__ __forceinline__
#else
#define KDTREE_BOTH inline
#endif
