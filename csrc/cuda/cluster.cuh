// What blocks of a cluster do together: their barrier, reads of each other's shared memory, and sums sent there. With CL = 1 a block is alone.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace kdtree {
namespace cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KD_CLUSTERS 1
#else
#define KD_CLUSTERS 0
#endif

// Barrier of a cluster of CL blocks in two halves; with CL = 1 of the block (then the arrival is nothing and the wait is all of it).
//
// What a block wrote to its own shared memory before it arrives, every block of the cluster finds there after its wait. That takes a
// release of the *cluster's* scope: a block's fence orders its stores for its own threads, which reach shared memory by the same queue,
// while another block's loads come in by the network and may pass stores that still stand behind copies in that queue. The arrival's own
// release covers all memory there is, so it waits for the copies in flight and empties the rings; the fence here is a release of this
// block's shared memory alone (PTX 8.6), after which a relaxed arrival is enough. Loads of other blocks' shared memory before an arrival
// have come back by then, because every thread has used what it loaded.
template <int CL>
__device__ __forceinline__ void cluster_arrive() {
#if KD_CLUSTERS
  if constexpr (CL > 1) {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
    asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
  }
#endif
}
template <int CL>
__device__ __forceinline__ void cluster_wait() {
#if KD_CLUSTERS
  if constexpr (CL > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  if constexpr (CL == 1) __syncthreads();
}
template <int CL>
__device__ __forceinline__ int cluster_rank() {
#if KD_CLUSTERS
  if constexpr (CL > 1) {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
  }
#endif
  return 0;
}
// Reads shared memory of block `rank` of the cluster, at the place that `at` is in this block.
template <int CL>
__device__ __forceinline__ float4 load_cluster16(uint32_t at, int rank) {
  float4 v;
#if KD_CLUSTERS
  if constexpr (CL > 1) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(there)
                 : "memory");
    return v;
  }
#endif
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}
template <int CL>
__device__ __forceinline__ float load_cluster4(uint32_t at, int rank) {
  float v;
#if KD_CLUSTERS
  if constexpr (CL > 1) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
    return v;
  }
#endif
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The address that block `rank` of the cluster has for what stands at `at` in this block.
__device__ __forceinline__ uint32_t cluster_address(uint32_t at, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
// Writes to another block's shared memory; its barrier there counts the bytes as they come.
__device__ __forceinline__ void send(uint32_t to, const float (&v)[4], uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3]), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send(uint32_t to, const float (&v)[2], uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(to), "f"(v[0]), "f"(v[1]), "r"(barrier)
               : "memory");
}

// The wait of a barrier of CL > 1 blocks; a block alone has nothing to wait for.
template <int CL>
__device__ __forceinline__ void cluster_wait_others() {
  if constexpr (CL > 1) cluster_wait<CL>();
}

#endif

}  // namespace cuda
}  // namespace kdtree
