// sr_sinkhorn of matrices that fit in the shared memory of a cluster of CLUSTER thread blocks: one read, one write.
//
// Legend: x [E, m, n]; every block of a cluster holds `rows` rows of one matrix in shared memory as it came. Sums and
// factors are float64, which covers every float32 without scaling. Sums are formed in a fixed order (lanes by
// shuffles, row groups and blocks by rank), so two runs agree to the bit. Column sums of the other blocks are read
// through distributed shared memory, after a barrier of the cluster.
//
// Compiled with -DCLUSTER=1|2|4|8 -DBITS=0|1 (bfloat16 as its bits) and -DAPPLY=0|1.
#include "device_maths.h"

#if BITS
typedef gr_u16 element;
#define WIDEN(value) gr_widen(value)
#define NARROW(value) gr_nearest(value)
#else
typedef float element;
#define WIDEN(value) (value)
#define NARROW(value) (value)
#endif

#ifndef THREADS  // a host build has one thread of one lane
#define THREADS 512
#define LANES 32
#endif
#define WARPS (THREADS / LANES)

__device__ __forceinline__ gr_u32 rank_in_cluster() {
#if CLUSTER > 1
  gr_u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

__device__ __forceinline__ void cluster_barrier() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ double peer(const double *mine, gr_u32 rank) {
#if CLUSTER > 1
  gr_u32 here = (gr_u32)__cvta_generic_to_shared(mine), there;
  double value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(there) : "memory");
  return value;
#else
  return *mine;
#endif
}

// 0 for an empty line, NaN where the sum is not finite: the whole matrix then becomes NaN, and no other.
__device__ __forceinline__ double factor(double total, int size) {
  if (total == 0) return 0;
  if (!(total < 1.7e308)) return __longlong_as_double(0x7FF8000000000000ll);
  return sqrt(size / total);
}

// Shared memory: v [n], w [rows], sums [groups * n] float64, then the rows, 16-byte aligned.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
sinkhorn_cluster(const element *__restrict__ x, element *target, double *row_factor, double *column_factor, double scale,
                 double kept, int m, int n, int rows, int groups, int sweeps) {
  extern __shared__ __align__(16) unsigned char memory[];
  double *v = (double *)memory, *w = v + n, *sums = w + rows;
  gr_u64 head = (gr_u64)(n + rows + groups * n) * 8;
  element *held = (element *)(memory + (head + 15) / 16 * 16);

  const gr_u32 rank = rank_in_cluster();
  const gr_u64 matrix = blockIdx.x / CLUSTER;
  const int first = (int)rank * rows;
  const int mine = first >= m ? 0 : (m - first < rows ? m - first : rows);
  const gr_u64 base = (matrix * (gr_u64)m + (gr_u64)first) * (gr_u64)n;
  const int count = mine * n, lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;

  const int packed = 16 / (int)sizeof(element);
  if (n % packed == 0) {
    const uint4 *source = (const uint4 *)(x + base);
    uint4 *into = (uint4 *)held;
    for (int k = threadIdx.x; k < count / packed; k += THREADS) into[k] = source[k];
  } else {
    for (int k = threadIdx.x; k < count; k += THREADS) held[k] = x[base + k];
  }
  for (int j = threadIdx.x; j < n; j += THREADS) v[j] = 1;
  __syncthreads();

  for (int sweep = 0; sweep < sweeps; ++sweep) {
    for (int i = warp; i < mine; i += WARPS) {
      double total = 0;
      for (int j = lane; j < n; j += LANES) {
        double t = (double)WIDEN(held[i * n + j]) * v[j];
        total += t * t;
      }
      for (int half = LANES / 2; half; half >>= 1) total += __shfl_xor_sync(0xFFFFFFFFu, total, half);
      if (lane == 0) w[i] = factor(total, n);
    }
    __syncthreads();
    for (int k = threadIdx.x; k < groups * n; k += THREADS) {
      int group = k / n, j = k - group * n;
      double total = 0;
      for (int i = group; i < mine; i += groups) {
        double y = (double)WIDEN(held[i * n + j]) * w[i];
        total += y * y;
      }
      sums[k] = total;
    }
    cluster_barrier();
    for (int j = threadIdx.x; j < n; j += THREADS) {
      double total = 0;
      for (gr_u32 other = 0; other < CLUSTER; ++other)
        for (int group = 0; group < groups; ++group) total += peer(sums + group * n + j, other);
      v[j] = factor(total, m);
    }
    cluster_barrier();  // nobody may overwrite its sums, or leave, while others read them
  }

  for (int i = warp; i < mine; i += WARPS) {
    double own = w[i] * scale;
    for (int j = lane; j < n; j += LANES) {
      double value = (double)WIDEN(held[i * n + j]) * own * v[j];
      gr_u64 at = base + (gr_u64)i * n + j;
#if APPLY
      value = (double)WIDEN(target[at]) * kept - value;
#endif
      target[at] = NARROW((float)value);
    }
    if (row_factor && lane == 0) row_factor[matrix * m + first + i] = w[i];
  }
  if (column_factor && rank == 0)
    for (int j = threadIdx.x; j < n; j += THREADS) column_factor[matrix * n + j] = v[j];
}
