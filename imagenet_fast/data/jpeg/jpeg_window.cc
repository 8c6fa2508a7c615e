#include "jpeg_window.h"

#ifdef __AVX2__

#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace jpeg {
namespace {

using Vector = __m256i;

Vector Load(const void* from) { return _mm256_loadu_si256(static_cast<const Vector*>(from)); }
void Store(Vector vector, void* to) { _mm256_storeu_si256(static_cast<Vector*>(to), vector); }

// Eight times two numbers of 16 bits.
Vector Pair(int first, int second) {
  return _mm256_set1_epi32(static_cast<int>(static_cast<uint16_t>(first) | static_cast<uint32_t>(second) << 16));
}

// ---- The inverse DCT -----------------------------------------------------------------------------

constexpr int kSide = 8;  // of a block

// Where a coefficient of the file's order, from low to high frequencies, is in memory: rows 0 and 2 alternate, and
// so do 1 and 3, 4 and 6, and 5 and 7, for sums of products of pairs.
struct Places {
  uint8_t at[kCoefficients] = {};

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
constexpr Places kPlaces;

// Before this place of the file's order, all coefficients are among the first four of the first four rows.
constexpr int kFewCoefficients = 10;

// The multipliers have 13 bits after the point; the first pass leaves 2 of them.
constexpr int kBits = 13, kLeft = 2;

// One dimension of the inverse DCT of Loeffler, Ligtenberg and Moschytz (1989), times 2**13 and the square root
// of 8: what each of eight coefficients adds to the first four outputs. Even ones add the same to the
// other four in reverse, odd ones the negative. The numbers are sums of the multipliers of the IJG's code, each
// rounded.
constexpr int16_t kTransform[kSide][4] = {
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
      wild_flat_ |= product != static_cast<int16_t>(2 * product) / 2;
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
      wild = _mm256_or_si256(wild, IsWild(pairs[i]));
    }
    Vector sums[kSide];
    for (int y = 0; y < kSide / 2; ++y) {
      constexpr int shift = kBits - kLeft;
      Vector even = _mm256_set1_epi32(1 << (shift - 1)), odd = _mm256_setzero_si256();
      for (int i = 0; i < halves; ++i) {
        const auto add = [&](Vector sum, int number) {
          const Vector factors = Pair(kTransform[4 * i + number][y], kTransform[4 * i + 2 + number][y]);
          return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs[2 * i + number], factors));
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
          rows[i] = _mm256_add_epi32(
              rows[i], _mm256_madd_epi16(_mm256_set1_epi32(both), Load(across_[pair])));
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
  static Vector IsWild(Vector numbers) { return _mm256_xor_si256(numbers, _mm256_add_epi16(numbers, numbers)); }

  alignas(Vector) int16_t coefficients_[kCoefficients] = {};
  alignas(Vector) int16_t across_[kSide / 2][2 * kSide];  // what two coefficients of a row add to its pixels
  Vector wild_ = _mm256_setzero_si256();      // the highest bits are set
  Vector overflow_ = _mm256_setzero_si256();  // any bits are set
  bool wild_flat_ = false;
};

// ---- Samples -------------------------------------------------------------------------------------

// A component's samples around the window.
struct Plane {
  int64_t top, left, bottom, right;  // in samples, of whole blocks; the last two exclusive
  int64_t rows, columns;             // samples of the whole image
  size_t stride;
  uint8_t* samples;
  alignas(Vector) int16_t quantization[kCoefficients];  // by kPlaces

  const uint8_t* At(int64_t y, int64_t x) const { return samples + (y - top) * stride + (x - left); }
};

// How much finer luma is than chroma.
struct Sampling {
  int across, down;
};

// Returns whether the pixels can be made here.
bool ReadSampling(const Header& header, Sampling* sampling) {
  *sampling = {1, 1};
  if (header.components == 1) return true;
  const Component* const parts = header.component;
  *sampling = {header.horizontal, header.vertical};
  const auto is = [](const Component& part, int horizontal, int vertical) {
    return part.horizontal == horizontal && part.vertical == vertical;
  };
  const bool known = (header.vertical == 1 && header.horizontal <= 2) ||
                     (header.vertical == 2 && header.horizontal == 2);
  return known && is(parts[0], header.horizontal, header.vertical) && is(parts[1], 1, 1) &&
         is(parts[2], 1, 1) &&
         // Narrower chroma is not made smooth.
         (header.horizontal == 1 || DivideUp(header.width, 2) > 2);
}

// Returns whether three components are YCbCr, as decoders find out.
bool IsYCbCr(const Header& header) {
  const auto is = [](const Segment& segment, int marker, const char* name, size_t bytes) {
    return segment.marker == marker && segment.content.size >= bytes &&
           std::memcmp(segment.content.data, name, 5) == 0;
  };
  bool adobe = false;
  int transform = 0;
  for (const Segment& segment : header.segments) {
    if (is(segment, kApp0, "JFIF", 14)) return true;
    if (!is(segment, kApp14, "Adobe", 12)) continue;
    adobe = true;
    transform = segment.content.data[11];
  }
  if (adobe) return transform == 1;
  for (int i = 0; i < 3; ++i) {
    if (header.component[i].id != i + 1) return false;
  }
  return true;
}

// Reads the quantization tables of the components; returns whether they have ones of 8 bits.
bool ReadQuantization(const Header& header, Plane* planes) {
  const uint8_t* tables[kTables] = {};
  for (const Segment& segment : header.segments) {
    if (segment.marker != kDqt) continue;
    constexpr size_t bytes = 1 + kCoefficients;
    Bytes left = segment.content;
    for (; left.size >= bytes; left = {left.data + bytes, left.size - bytes}) {
      if (left.data[0] >= kTables) return false;
      tables[left.data[0]] = left.data + 1;
    }
    if (left.size) return false;
  }
  for (int i = 0; i < header.components; ++i) {
    const int number = header.component[i].quantization;
    if (number >= kTables || !tables[number]) return false;
    for (int j = 0; j < kCoefficients; ++j) planes[i].quantization[kPlaces.at[j]] = tables[number][j];
  }
  return true;
}

// Decodes the blocks of MCUs that the planes hold.
class Decoder {
 public:
  Decoder(const IndexedJpeg& jpeg, const Plane* planes) : jpeg_(jpeg), planes_(planes) {}

  Result Decode(const Run& run) {
    const Header& header = jpeg_.header;
    BitReader bits(jpeg_.jpeg, run.start);
    int dc[kMostComponents];
    std::copy(run.dc_before, run.dc_before + kMostComponents, dc);
    int64_t row = run.first / header.columns, column = run.first % header.columns;
    for (int64_t mcu = run.first; mcu < run.last; ++mcu) {
      for (int number = 0; number < header.components; ++number) {
        const Component& component = header.component[number];
        const Plane& plane = planes_[number];
        for (int v = 0; v < component.vertical; ++v) {
          for (int h = 0; h < component.horizontal; ++h) {
            const int64_t y = (row * component.vertical + v) * kSide;
            const int64_t x = (column * component.horizontal + h) * kSide;
            int difference;
            if (!ReadDc(header.dc_table(number), &bits, &difference)) return Result::kCorrupt;
            dc[number] += difference;
            const CodeTable& table = header.ac_table(number);
            if (y < plane.top || y >= plane.bottom || x < plane.left || x >= plane.right) {
              if (!SkipAc(table, &bits)) return Result::kCorrupt;
              continue;
            }
            int16_t* const coefficients = idct_.coefficients();
            coefficients[0] = dc[number];
            int last = 0;
            const auto take = [&](int place, int value) {
              coefficients[kPlaces.at[place]] = value;
              last = place;
            };
            if (!ReadAc(table, &bits, take)) return Result::kCorrupt;
            idct_.Make(plane.quantization, last, plane.samples + (y - plane.top) * plane.stride + (x - plane.left),
                       plane.stride);
          }
        }
      }
      if (++column == header.columns) {
        column = 0;
        ++row;
      }
    }
    const bool fits = bits.position() == run.end && std::equal(dc, dc + header.components, run.dc_after);
    return fits ? Result::kOk : Result::kCorrupt;
  }

  bool wild() const { return idct_.wild(); }

 private:
  const IndexedJpeg& jpeg_;
  const Plane* planes_;
  Idct idct_;
};

// ---- Pixels --------------------------------------------------------------------------------------

// Upsamples a row of chroma to `width` samples from column `left` of the image. Each is a mean of the nearest two
// samples in each direction, weighted 3:1, at the image's borders of the border's.
// `sums`: as many as chroma's columns that are needed, and one more on each side.
template <int down>
ALWAYS_INLINE void Upsample(const Plane& plane, int64_t y, int64_t left, int64_t width, int16_t* sums,
                            uint8_t* out) {
  const int64_t first = left / 2, last = (left + width - 1) / 2;
  const int64_t begin = std::max<int64_t>(first - 1, 0), end = std::min(last + 1, plane.columns - 1);
  const int64_t near = y / down, far = y % 2 ? near + 1 : near - 1;
  const uint8_t* const nearest = plane.At(near, begin);
  int16_t* const needed = sums + 1;  // from the first
  int16_t* const to = needed + (begin - first);
  const int count = static_cast<int>(end - begin + 1);
  if constexpr (down == 2) {
    const uint8_t* const next = plane.At(std::clamp<int64_t>(far, 0, plane.rows - 1), begin);
    for (int i = 0; i < count; ++i) to[i] = 3 * nearest[i] + next[i];
  } else {
    for (int i = 0; i < count; ++i) to[i] = nearest[i];
  }
  if (first == 0) needed[-1] = needed[0];
  const int samples = static_cast<int>(last - first + 1);
  if (last == plane.columns - 1) needed[samples] = needed[samples - 1];
  constexpr int shift = down == 2 ? 4 : 2, before = down == 2 ? 8 : 1, after = down == 2 ? 7 : 2;
  for (int i = 0; i < samples; ++i) {
    out[2 * i] = (3 * needed[i] + needed[i - 1] + before) >> shift;
    out[2 * i + 1] = (3 * needed[i] + needed[i + 1] + after) >> shift;
  }
}

// Multipliers of chroma by ITU-R BT.601, as in JFIF, with 16 bits after the point.
constexpr int kOne = 1 << 16, kRedOfRed = 91881, kGreenOfBlue = -22554, kGreenOfRed = -46802,
              kBlueOfBlue = 116130;

uint8_t Clip(int value) { return std::clamp(value, 0, 255); }

// For each 16 of the 48 bytes of 16 pixels: where they are among the 16 of each colour; 128: they are another's.
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
constexpr Mixing kMixing;

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

void ToRgb(const uint8_t* luma, const uint8_t* blue, const uint8_t* red, int width, uint8_t* to) {
  int x = 0;
  for (; x + 16 <= width; x += 16) ToRgb16(luma + x, blue + x, red + x, to + 3 * x);
  for (; x < width; ++x) {
    const int y = luma[x], b = blue[x] - 128, r = red[x] - 128;
    to[3 * x] = Clip(y + ((kRedOfRed * r + kOne / 2) >> 16));
    to[3 * x + 1] = Clip(y + ((kGreenOfBlue * b + kGreenOfRed * r + kOne / 2) >> 16));
    to[3 * x + 2] = Clip(y + ((kBlueOfBlue * b + kOne / 2) >> 16));
  }
}

// Memory for a row of chroma.
struct ChromaRow {
  int16_t* sums;
  uint8_t* samples;
};

void MakePixels(const Plane* planes, int components, const Sampling& sampling, const Window& window,
                const ChromaRow* rows, uint8_t* to) {
  const int width = static_cast<int>(window.width);
  for (int64_t y = window.top; y < window.top + window.height; ++y, to += 3 * window.width) {
    const uint8_t* const luma = planes[0].At(y, window.left);
    if (components == 1) {
      for (int x = 0; x < width; ++x) to[3 * x] = to[3 * x + 1] = to[3 * x + 2] = luma[x];
      continue;
    }
    const uint8_t* chroma[2];
    for (int i = 0; i < 2; ++i) {
      const Plane& plane = planes[1 + i];
      if (sampling.across == 1) {
        chroma[i] = plane.At(y, window.left);
        continue;
      }
      const auto upsample = sampling.down == 2 ? Upsample<2> : Upsample<1>;
      upsample(plane, y, window.left, width, rows[i].sums, rows[i].samples);
      chroma[i] = rows[i].samples + window.left % 2;
    }
    ToRgb(luma, chroma[0], chroma[1], width, to);
  }
}

// Sets which samples a window needs of a component that is `factor` times coarser, along one axis of `length`
// pixels: those of whole blocks, with a margin of one sample on each side for upsampling.
void SetSpan(int64_t begin, int64_t size, int64_t length, int factor, int64_t* first, int64_t* last,
             int64_t* samples) {
  const int margin = factor - 1;
  *samples = DivideUp(length, factor);
  *first = std::max<int64_t>(begin / factor - margin, 0) / kSide * kSide;
  *last = DivideUp(std::min((begin + size - 1) / factor + 1 + margin, *samples), kSide) * kSide;
}

}  // namespace

Result DecodeWindow(const IndexedJpeg& jpeg, const Window& window, Buffer* memory, uint8_t* pixels) {
  const Header& header = jpeg.header;
  Sampling sampling;
  Plane planes[kMostComponents];
  if (!ReadSampling(header, &sampling) || (header.components == 3 && !IsYCbCr(header)) ||
      !ReadQuantization(header, planes)) {
    return Result::kUnsupported;
  }
  size_t bytes = 0;
  for (int i = 0; i < header.components; ++i) {
    Plane& plane = planes[i];
    SetSpan(window.top, window.height, header.height, i ? sampling.down : 1, &plane.top, &plane.bottom,
            &plane.rows);
    SetSpan(window.left, window.width, header.width, i ? sampling.across : 1, &plane.left, &plane.right,
            &plane.columns);
    plane.stride = plane.right - plane.left;
    bytes += plane.stride * (plane.bottom - plane.top);
  }
  const size_t row = window.width + 4;
  uint8_t* at = memory->Get(bytes + 2 * row * (sizeof(int16_t) + 1));
  if (!at) return Result::kNoRoom;
  ChromaRow rows[2];
  for (ChromaRow& chroma : rows) {
    chroma.sums = reinterpret_cast<int16_t*>(at);
    at += row * sizeof(int16_t);
  }
  for (ChromaRow& chroma : rows) {
    chroma.samples = at;
    at += row;
  }
  for (int i = 0; i < header.components; ++i) {
    planes[i].samples = at;
    at += planes[i].stride * (planes[i].bottom - planes[i].top);
  }
  Decoder decoder(jpeg, planes);
  const Result result = jpeg.ForEachRun(jpeg.Around(window, 1),
                                        [&decoder](const Run& run) { return decoder.Decode(run); });
  if (result != Result::kOk) return result;
  if (decoder.wild()) return Result::kUnsupported;
  MakePixels(planes, header.components, sampling, window, rows, pixels);
  return Result::kOk;
}

}  // namespace jpeg

#else

namespace jpeg {

// Other machines have no faster way than libjpeg-turbo's.
Result DecodeWindow(const IndexedJpeg&, const Window&, Buffer*, uint8_t*) { return Result::kUnsupported; }

}  // namespace jpeg

#endif
