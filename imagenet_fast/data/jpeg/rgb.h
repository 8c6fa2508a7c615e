// Colours of JPEGs, by integers: libjpeg-turbo's, to the bit.

#ifndef IMAGENET_FAST_RGB_H_
#define IMAGENET_FAST_RGB_H_

#include <algorithm>
#include <cstdint>

#include "always_inline.h"
#include "vector.h"

namespace jpeg {

// Multipliers of chroma by ITU-R BT.601, as in JFIF, with 16 bits after the point.
constexpr int kOne = 1 << 16, kRedOfRed = 91881, kGreenOfBlue = -22554, kGreenOfRed = -46802,
              kBlueOfBlue = 116130;

inline uint8_t Clip(int value) { return std::clamp(value, 0, 255); }

// For each 16 of the 48 bytes of 16 pixels: where they are among the 16 of each colour; 128: they are of
// another one.
struct Mixing {
  uint8_t from[3][3][16] = {};

  constexpr Mixing() {
    for (int i = 0; i < 48; ++i) {
      for (int color = 0; color < 3; ++color) {
        from[i / 16][color][i % 16] = i % 3 == color ? i / 3 : 128;
      }
    }
  }
};
inline constexpr Mixing kMixing;

// Converts sixteen pixels. Of multipliers that have more than 16 bits, multiples of kOne are added apart.
ALWAYS_INLINE void ToRgb16(const uint8_t* luma, const uint8_t* blue, const uint8_t* red, uint8_t* to) {
  const auto words = [](const uint8_t* from, int less) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_sub_epi16(_mm256_cvtepu8_epi16(bytes), _mm256_set1_epi16(less));
  };
  const Vector y = words(luma, 0), b = words(blue, 128), r = words(red, 128);
  // Returns chroma times a fraction, rounded.
  const auto times = [](Vector chroma, int fraction) {
    const Vector twice =
        _mm256_mulhi_epi16(_mm256_add_epi16(chroma, chroma), _mm256_set1_epi16(fraction));
    return _mm256_srai_epi16(_mm256_add_epi16(twice, _mm256_set1_epi16(1)), 1);
  };
  const auto green = [](Vector pairs) {
    const Vector sum = _mm256_madd_epi16(pairs, Pair(kGreenOfBlue, kGreenOfRed + kOne));
    return _mm256_srai_epi32(_mm256_add_epi32(sum, _mm256_set1_epi32(kOne / 2)), 16);
  };
  const Vector greens = _mm256_packs_epi32(green(_mm256_unpacklo_epi16(b, r)),
                                           green(_mm256_unpackhi_epi16(b, r)));
  const Vector more[3] = {
      _mm256_add_epi16(r, times(r, kRedOfRed - kOne)), _mm256_sub_epi16(greens, r),
      _mm256_add_epi16(_mm256_add_epi16(b, b), times(b, kBlueOfBlue - 2 * kOne))};
  __m128i colors[3];
  for (int i = 0; i < 3; ++i) {
    const Vector sum = _mm256_add_epi16(y, more[i]);
    colors[i] = _mm_packus_epi16(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  }
  for (int part = 0; part < 3; ++part) {
    __m128i mixed = _mm_setzero_si128();
    for (int i = 0; i < 3; ++i) {
      const __m128i from = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMixing.from[part][i]));
      mixed = _mm_or_si128(mixed, _mm_shuffle_epi8(colors[i], from));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * part), mixed);
  }
}

// Converts a row of YCbCr to RGB.
inline void ToRgb(const uint8_t* luma, const uint8_t* blue, const uint8_t* red, int width, uint8_t* to) {
  int x = 0;
  for (; x + 16 <= width; x += 16) ToRgb16(luma + x, blue + x, red + x, to + 3 * x);
  for (; x < width; ++x) {
    const int y = luma[x], b = blue[x] - 128, r = red[x] - 128;
    to[3 * x] = Clip(y + ((kRedOfRed * r + kOne / 2) >> 16));
    to[3 * x + 1] = Clip(y + ((kGreenOfBlue * b + kGreenOfRed * r + kOne / 2) >> 16));
    to[3 * x + 2] = Clip(y + ((kBlueOfBlue * b + kOne / 2) >> 16));
  }
}

}  // namespace jpeg

#endif  // IMAGENET_FAST_RGB_H_
