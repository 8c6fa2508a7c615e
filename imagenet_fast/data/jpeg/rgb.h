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

// Where the bytes of pixels are, among `pixels` of each color in turn.
template <int pixels>
struct Mixing {
  uint8_t from[3 * pixels] = {};

  constexpr Mixing() {
    for (int i = 0; i < 3 * pixels; ++i) from[i] = i % 3 * pixels + i / 3;
  }
};
inline constexpr Mixing<kWords> kMixing;

ALWAYS_INLINE void StorePixels(WordsAsBytes red, WordsAsBytes green, WordsAsBytes blue, uint8_t* to) {
#ifdef __AVX512VBMI__
  const __m512i first = _mm512_inserti64x4(_mm512_castsi256_si512(red), green, 1);
  const __m512i second = _mm512_castsi256_si512(blue);
  const __m512i mixed = _mm512_permutex2var_epi8(first, _mm512_loadu_si512(kMixing.from), second);
  const __m512i rest = _mm512_permutex2var_epi8(
      first, _mm512_castsi256_si512(Load(kMixing.from + sizeof first)), second);
  _mm512_storeu_si512(to, mixed);
  Store(_mm512_castsi512_si256(rest), to + sizeof first);
#else
  const __m128i colors[] = {red, green, blue};
  for (int part = 0; part < 3; ++part) {
    __m128i from = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMixing.from) + part);
    __m128i mixed = _mm_setzero_si128();
    for (__m128i color : colors) {
      // Places below 0 give 0, as places after 15 shall.
      const __m128i after = _mm_cmpgt_epi8(from, _mm_set1_epi8(15));
      mixed = _mm_or_si128(mixed, _mm_shuffle_epi8(color, _mm_or_si128(from, after)));
      from = _mm_sub_epi8(from, _mm_set1_epi8(16));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + part, mixed);
  }
#endif
}

// Converts kWords pixels. Of multipliers that have more than 16 bits, multiples of kOne are added apart.
ALWAYS_INLINE void ToRgbAtOnce(const uint8_t* luma, const uint8_t* blue, const uint8_t* red, uint8_t* to) {
  const Words y = WordsOfBytes(luma), less = WORDS(set1_epi16)(128);
  const Words b = WORDS(sub_epi16)(WordsOfBytes(blue), less);
  const Words r = WORDS(sub_epi16)(WordsOfBytes(red), less);
  // Returns chroma times a fraction, rounded.
  const auto times = [](Words chroma, int fraction) {
    const Words twice =
        WORDS(mulhi_epi16)(WORDS(add_epi16)(chroma, chroma), WORDS(set1_epi16)(fraction));
    return WORDS(srai_epi16)(WORDS(add_epi16)(twice, WORDS(set1_epi16)(1)), 1);
  };
  const auto green = [](Words pairs) {
    const Words factors = WORDS(set1_epi32)(PairOf(kGreenOfBlue, kGreenOfRed + kOne));
    const Words sum = WORDS(madd_epi16)(pairs, factors);
    return WORDS(srai_epi32)(WORDS(add_epi32)(sum, WORDS(set1_epi32)(kOne / 2)), 16);
  };
  const Words greens = WORDS(packs_epi32)(green(WORDS(unpacklo_epi16)(b, r)),
                                          green(WORDS(unpackhi_epi16)(b, r)));
  const auto color = [y](Words more) { return ToBytes(WORDS(add_epi16)(y, more)); };
  StorePixels(color(WORDS(add_epi16)(r, times(r, kRedOfRed - kOne))), color(WORDS(sub_epi16)(greens, r)),
              color(WORDS(add_epi16)(WORDS(add_epi16)(b, b), times(b, kBlueOfBlue - 2 * kOne))), to);
}

// Converts a row of YCbCr to RGB.
inline void ToRgb(const uint8_t* luma, const uint8_t* blue, const uint8_t* red, int width, uint8_t* to) {
  if (width >= kWords) {
    // The last ones overlap those before.
    for (int x = 0; x < width; x += kWords) {
      const int at = std::min(x, width - kWords);
      ToRgbAtOnce(luma + at, blue + at, red + at, to + 3 * at);
    }
    return;
  }
  for (int x = 0; x < width; ++x) {
    const int y = luma[x], b = blue[x] - 128, r = red[x] - 128;
    to[3 * x] = Clip(y + ((kRedOfRed * r + kOne / 2) >> 16));
    to[3 * x + 1] = Clip(y + ((kGreenOfBlue * b + kGreenOfRed * r + kOne / 2) >> 16));
    to[3 * x + 2] = Clip(y + ((kBlueOfBlue * b + kOne / 2) >> 16));
  }
}

}  // namespace jpeg

#endif  // IMAGENET_FAST_RGB_H_
