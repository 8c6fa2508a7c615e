// The inverse DCT of JPEGs' blocks, by integers: libjpeg-turbo's accurate one, to the bit.

#ifndef IMAGENET_FAST_IDCT_H_
#define IMAGENET_FAST_IDCT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "always_inline.h"
#include "vector.h"

namespace jpeg {

constexpr int kSide = 8;  // of a block

// Where a coefficient of the file's order, from low to high frequencies, is in memory: rows 0 and 2 alternate,
// and so do 1 and 3, 4 and 6, and 5 and 7, for sums of products of pairs.
struct Places {
  uint8_t at[kSide * kSide] = {};

  constexpr Places() {
    // Along the diagonals, up and down in turn.
    int y = 0, x = 0;
    for (uint8_t& place : at) {
      place = (y / 4 * 2 + y % 2) * 2 * kSide + 2 * x + y % 4 / 2;
      const bool up = (y + x) % 2 == 0;
      int& grows = up ? x : y;
      int& falls = up ? y : x;
      if (grows == kSide - 1) {
        ++falls;
      } else {
        ++grows;
        falls -= falls > 0;
      }
    }
  }
};
inline constexpr Places kPlaces;

// Before this place of the file's order, all coefficients are among the first four of the first four rows.
constexpr int kFewCoefficients = 10;

// The multipliers have 13 bits after the point; the first pass leaves 2 of them.
constexpr int kBits = 13, kLeft = 2;

// One dimension of the inverse DCT of Loeffler, Ligtenberg and Moschytz (1989), times 2**13 and the square
// root of 8: what each of eight coefficients adds to the first four outputs. Even ones add the same to the
// other four in reverse, odd ones the negative. The numbers are sums of the multipliers of the IJG's code,
// each of which is rounded.
inline constexpr int16_t kTransform[kSide][4] = {
    {8192, 8192, 8192, 8192},     {11363, 9633, 6437, 2260},   {10703, 4433, -4433, -10703},
    {9633, -2259, -11362, -6436}, {8192, -8192, -8192, 8192},  {6437, -11362, 2261, 9633},
    {4433, -10704, 10704, -4433}, {2260, -6436, 9633, -11363},
};

// Makes pixels of blocks' coefficients.
class Idct {
 public:
  Idct() {
    for (int pair = 0; pair < kSide / 2; ++pair) {
      for (int x = 0; x < kSide; ++x) {
        for (int i = 0; i < 2; ++i) {
          const int number = 2 * pair + i, sign = number % 2 && x >= kSide / 2 ? -1 : 1;
          across_[pair][2 * x + i] = sign * kTransform[number][std::min(x, kSide - 1 - x)];
        }
      }
    }
  }

  // Of a block, by kPlaces and before they are multiplied by the quantization; all 0 at the start.
  int16_t* coefficients() { return coefficients_; }

  // Writes the block's pixels and sets its coefficients to 0. `last`: place of the last one that is not 0.
  ALWAYS_INLINE void Make(const int16_t* quantization, int last, uint8_t* to, size_t stride) {
    if (last == 0) {
      const int product = coefficients_[0] * quantization[0];
      coefficients_[0] = 0;
      constexpr int most = 16383 >> kLeft;
      wild_flat_ |= product > most || product < -most;
      const int pixel = std::clamp(((product + 4) >> 3) + 128, 0, 255);
      for (int y = 0; y < kSide; ++y) std::memset(to + y * stride, pixel, kSide);
    } else if (last < kFewCoefficients) {
      MakeBlock<1>(quantization, to, stride);
    } else {
      MakeBlock<2>(quantization, to, stride);
    }
  }

  // Whether a number did not fit into 15 bits. Sums of two overflow in libjpeg-turbo's vectors of 16 bits.
  bool wild() const {
    return wild_flat_ || (_mm256_movemask_epi8(wild_) & 0xAAAAAAAA) ||
           !_mm256_testz_si256(overflow_, overflow_);
  }

 private:
  // `halves`: 1 if only the first four rows and columns have coefficients.
  template <int halves>
  ALWAYS_INLINE void MakeBlock(const int16_t* quantization, uint8_t* to, size_t stride) {
    Vector pairs[2 * halves], wild = wild_, overflow = overflow_;
    for (int i = 0; i < 2 * halves; ++i) {
      int16_t* const from = coefficients_ + 2 * kSide * i;
      const Vector values = Load(from), factors = Load(quantization + 2 * kSide * i);
      Store(_mm256_setzero_si256(), from);
      pairs[i] = _mm256_mullo_epi16(values, factors);
      const Vector high = _mm256_mulhi_epi16(values, factors);
      const Vector sign = _mm256_srai_epi16(pairs[i], 15);
      overflow = _mm256_or_si256(overflow, _mm256_xor_si256(sign, high));
      // Sums of eight could overflow unseen.
      wild = _mm256_or_si256(wild, IsWild(pairs[i]));
    }
    Vector sums[kSide];
    for (int y = 0; y < kSide / 2; ++y) {
      constexpr int shift = kBits - kLeft;
      Vector even = _mm256_set1_epi32(1 << (shift - 1)), odd = _mm256_setzero_si256();
      for (int i = 0; i < halves; ++i) {
        const auto add = [&](Vector sum, int number) {
          return AddProducts(sum, pairs[2 * i + number],
                             Pair(kTransform[4 * i + number][y], kTransform[4 * i + 2 + number][y]));
        };
        even = add(even, 0);
        odd = add(odd, 1);
      }
      sums[y] = _mm256_srai_epi32(_mm256_add_epi32(even, odd), shift);
      sums[kSide - 1 - y] = _mm256_srai_epi32(_mm256_sub_epi32(even, odd), shift);
    }
    alignas(Vector) int16_t between[kSide][kSide];
    for (int y = 0; y < kSide; y += 2) {
      // Packing alternates between the halves of the two rows.
      const Vector rows = _mm256_permute4x64_epi64(_mm256_packs_epi32(sums[y], sums[y + 1]), 0xD8);
      wild = _mm256_or_si256(wild, IsWild(rows));
      Store(rows, between[y]);
    }
    wild_ = wild;
    overflow_ = overflow;
    // From memory, a pair is read into all elements of a vector at once.
    asm("" : "+m"(between));
    for (int y = 0; y < kSide; y += 4) {
      Vector rows[4];
      for (int i = 0; i < 4; ++i) {
        constexpr int shift = kBits + kLeft + 3;
        rows[i] = _mm256_set1_epi32((128 << shift) + (1 << (shift - 1)));
        for (int pair = 0; pair < 2 * halves; ++pair) {
          int32_t both;
          std::memcpy(&both, between[y + i] + 2 * pair, sizeof both);
          rows[i] = AddProducts(rows[i], _mm256_set1_epi32(both), Load(across_[pair]));
        }
        rows[i] = _mm256_srai_epi32(rows[i], shift);
      }
      const Vector bytes = _mm256_packus_epi16(_mm256_packs_epi32(rows[0], rows[1]),
                                               _mm256_packs_epi32(rows[2], rows[3]));
      alignas(Vector) uint8_t pixels[4][kSide];
      Store(_mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)), pixels);
      for (int i = 0; i < 4; ++i) std::memcpy(to + (y + i) * stride, pixels[i], kSide);
    }
  }

  // Sets the highest bit of numbers that do not fit into 15 bits.
  static Vector IsWild(Vector numbers) {
    return _mm256_xor_si256(numbers, _mm256_add_epi16(numbers, numbers));
  }

  alignas(Vector) int16_t coefficients_[kSide * kSide] = {};
  alignas(Vector) int16_t across_[kSide / 2][2 * kSide];  // what two coefficients of a row add to its pixels
  Vector wild_ = _mm256_setzero_si256();      // the highest bits are set
  Vector overflow_ = _mm256_setzero_si256();  // any bits are set
  bool wild_flat_ = false;
};

}  // namespace jpeg

#endif  // IMAGENET_FAST_IDCT_H_
