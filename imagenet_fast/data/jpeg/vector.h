// Vectors of AVX2, of sixteen numbers of 16 bits or eight of 32; and wider ones of machines with AVX-512.

#ifndef IMAGENET_FAST_VECTOR_H_
#define IMAGENET_FAST_VECTOR_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "always_inline.h"

namespace jpeg {

using Vector = __m256i;

inline Vector Load(const void* from) { return _mm256_loadu_si256(static_cast<const Vector*>(from)); }
inline void Store(Vector vector, void* to) { _mm256_storeu_si256(static_cast<Vector*>(to), vector); }

// Two numbers of 16 bits.
constexpr int32_t PairOf(int first, int second) {
  return static_cast<int32_t>((first & 0xFFFF) | static_cast<uint32_t>(second) << 16);
}

// Eight times two numbers of 16 bits.
inline Vector Pair(int first, int second) { return _mm256_set1_epi32(PairOf(first, second)); }

// Adds products of pairs of 16-bit numbers.
ALWAYS_INLINE Vector AddProducts(Vector sum, Vector one, Vector other) {
#ifdef __AVX512VNNI__
  return _mm256_dpwssd_epi32(sum, one, other);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(one, other));
#endif
}

// Pixels' numbers of 16 bits, and as many of 8 bits.
#ifdef __AVX512VBMI__
using Words = __m512i;
using WordsAsBytes = __m256i;
#define WORDS(operation) _mm512_##operation
#else
using Words = __m256i;
using WordsAsBytes = __m128i;
#define WORDS(operation) _mm256_##operation
#endif

constexpr int kWords = sizeof(Words) / sizeof(int16_t);

ALWAYS_INLINE Words LoadWords(const void* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

ALWAYS_INLINE void StoreWords(Words words, void* to) { std::memcpy(to, &words, sizeof words); }

ALWAYS_INLINE Words WordsOfBytes(const uint8_t* from) {
  WordsAsBytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return WORDS(cvtepu8_epi16)(bytes);
}

// Clips them to 0 to 255.
ALWAYS_INLINE WordsAsBytes ToBytes(Words words) {
#ifdef __AVX512VBMI__
  return _mm512_cvtusepi16_epi8(_mm512_max_epi16(words, _mm512_setzero_si512()));
#else
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#endif
}

}  // namespace jpeg

#endif  // IMAGENET_FAST_VECTOR_H_
