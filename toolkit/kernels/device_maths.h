// Device arithmetic that a host compiler builds too, so that it is tested without a GPU.
// Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 4.3.
#ifndef GRADREEL_DEVICE_MATHS_H
#define GRADREEL_DEVICE_MATHS_H

#ifdef __CUDACC__
#define GR_DEVICE __device__ __forceinline__
#else
#define GR_DEVICE static inline
#endif

typedef unsigned int gr_u32;
typedef unsigned long long gr_u64;
typedef unsigned short gr_u16;

// The random word of one element: word `element % 4` of block `element / 4`; `step` is the upper half of the counter.
GR_DEVICE gr_u32 gr_philox(gr_u32 key0, gr_u32 key1, gr_u64 step, gr_u64 element) {
  gr_u64 block = element >> 2;
  gr_u32 c[4] = {(gr_u32)block, (gr_u32)(block >> 32), (gr_u32)step, (gr_u32)(step >> 32)};
  for (int round = 0; round < 10; ++round) {
    gr_u64 p0 = (gr_u64)0xD2511F53u * c[0], p1 = (gr_u64)0xCD9E8D57u * c[2];
    gr_u32 next0 = (gr_u32)(p1 >> 32) ^ c[1] ^ key0, next2 = (gr_u32)(p0 >> 32) ^ c[3] ^ key1;
    c[1] = (gr_u32)p1;
    c[3] = (gr_u32)p0;
    c[0] = next0;
    c[2] = next2;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  gr_u32 which = (gr_u32)(element & 3);
  return which == 0 ? c[0] : which == 1 ? c[1] : which == 2 ? c[2] : c[3];
}

GR_DEVICE gr_u32 gr_bits(float value) {
  union { float f; gr_u32 u; } both;
  both.f = value;
  return both.u;
}

GR_DEVICE float gr_float(gr_u32 pattern) {
  union { float f; gr_u32 u; } both;
  both.u = pattern;
  return both.f;
}

GR_DEVICE float gr_widen(gr_u16 bfloat16) { return gr_float((gr_u32)bfloat16 << 16); }

GR_DEVICE gr_u16 gr_nearest(float value) {
  gr_u32 pattern = gr_bits(value);
  // Quiet NaN by hand: rounding its payload up could carry into an infinity or a zero.
  if ((pattern & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return (gr_u16)((pattern + 0x7FFFu + ((pattern >> 16) & 1u)) >> 16);
}

// Add 16 random bits below what bfloat16 keeps, and cut: unbiased, and representable values stay where they are.
GR_DEVICE gr_u16 gr_stochastic(float value, gr_u32 word) {
  gr_u32 pattern = gr_bits(value);
  if ((pattern & 0x7F800000u) == 0x7F800000u) return gr_nearest(value);
  return (gr_u16)((pattern + (word >> 16)) >> 16);
}

#endif
