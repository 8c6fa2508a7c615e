// Vectors of AVX2, of sixteen numbers of 16 bits or eight of 32.

#ifndef IMAGENET_FAST_VECTOR_H_
#define IMAGENET_FAST_VECTOR_H_

#include <immintrin.h>

#include <cstdint>

namespace jpeg {

using Vector = __m256i;

inline Vector Load(const void* from) { return _mm256_loadu_si256(static_cast<const Vector*>(from)); }
inline void Store(Vector vector, void* to) { _mm256_storeu_si256(static_cast<Vector*>(to), vector); }

// Eight times two numbers of 16 bits.
inline Vector Pair(int first, int second) {
  return _mm256_set1_epi32(static_cast<int32_t>((first & 0xFFFF) | static_cast<uint32_t>(second) << 16));
}

}  // namespace jpeg

#endif  // IMAGENET_FAST_VECTOR_H_
