#include "resize.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "always_inline.h"

namespace resize {
namespace {

// Entries a unit of distance in TensorFlow's table of cubic weights.
constexpr int kTableSize = 1 << 10;

// A pixel's three colors and the first of the next pixel: one SIMD register, of which the last
// element is ignored. Rows are therefore allocated with kPadding more elements.
typedef float Pixel __attribute__((vector_size(16), aligned(4)));
constexpr int kPadding = 1;

inline Pixel Load(const float* from) { return *reinterpret_cast<const Pixel*>(from); }
inline void Store(Pixel pixel, float* to) { *reinterpret_cast<Pixel*>(to) = pixel; }

// The position of an output pixel's centre in the input, in pixels.
inline float InputPosition(int out, int in_size, int out_size) {
  const float scale = static_cast<float>(in_size) / static_cast<float>(out_size);
  return (static_cast<float>(out) + 0.5f) * scale - 0.5f;
}

// Along an axis, each output pixel is a weighted mean of a span of input pixels.
struct Spans {
  int size;                    // output pixels
  int most;                    // room for the weights of a span
  std::vector<int> first;      // [size], the first input pixel
  std::vector<int> count;      // [size], input pixels
  std::vector<float> weights;  // [size, most]

  Spans(int size, int most)
      : size(size), most(most), first(size), count(size), weights(size_t{1} * size * most) {}

  float* WeightsOf(int out) { return weights.data() + size_t{1} * out * most; }
  const float* WeightsOf(int out) const { return weights.data() + size_t{1} * out * most; }
};

// Makes the spans of an axis.
typedef Spans MakeSpans(int in_size, int out_size);

// Taps of shrinking by a half with the widest filter.
constexpr int kUnrolled = 8;

// ---- Filters -------------------------------------------------------------------------------------

// Returns Keys' cubic kernel (a = -0.5) at i / kTableSize, each followed by its value at
// 1 + i / kTableSize.
std::vector<float> CubicTable() {
  constexpr double a = -0.5;
  std::vector<float> table(2 * (kTableSize + 1));
  for (int i = 0; i <= kTableSize; ++i) {
    float x = i * 1.0 / kTableSize;
    table[2 * i] = ((a + 2) * x - (a + 3)) * x * x + 1;
    x += 1.0;
    table[2 * i + 1] = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
  }
  return table;
}

// Spans of at most four pixels: those outside the image have no weight.
Spans CubicSpans(int in_size, int out_size) {
  static const std::vector<float>* const table = new std::vector<float>(CubicTable());
  Spans spans(out_size, 4);
  for (int out = 0; out < out_size; ++out) {
    const float position = InputPosition(out, in_size, out_size);
    const int below = static_cast<int>(std::floor(position));
    const int offset = static_cast<int>(std::lrint((position - below) * kTableSize));
    const int entries[4] = {2 * offset + 1, 2 * offset, 2 * (kTableSize - offset),
                            2 * (kTableSize - offset) + 1};
    const int first = std::max(below - 1, 0), end = std::min(below + 3, in_size);
    float* const weights = spans.WeightsOf(out);
    float sum = 0;
    for (int index = first; index < end; ++index) {
      sum += weights[index - first] = (*table)[entries[index - (below - 1)]];
    }
    const float scale = 1.0f / sum;
    for (int i = 0; i < end - first; ++i) weights[i] *= scale;
    spans.first[out] = first;
    spans.count[out] = end - first;
  }
  return spans;
}

float Triangle(float distance) { return std::max(1.0f - distance, 0.0f); }

// Keys' cubic kernel.
float Keys(float distance) {
  if (distance >= 2.0f) return 0.0f;
  if (distance >= 1.0f) return ((-0.5f * distance + 2.5f) * distance - 4.0f) * distance + 2.0f;
  return ((1.5f * distance - 2.5f) * distance) * distance + 1.0f;
}

// Spans of a filter that is widened when shrinking, which antialiases.
template <float (*filter)(float), int radius>
Spans WidenedSpans(int in_size, int out_size) {
  const float scale = static_cast<float>(out_size) / static_cast<float>(in_size);
  const float step = 1.0 / scale;
  const float width = std::max(step, 1.0f);
  const float inverse_width = 1.0f / width;
  Spans spans(out_size, std::min(static_cast<int>(2 * radius * width) + 2, in_size));
  for (int out = 0; out < out_size; ++out) {
    const float center = (out + 0.5f) * step;
    const auto clamp = [in_size](float index) {
      return std::clamp(static_cast<int>(index), 0, in_size - 1);
    };
    const int first = clamp(std::ceil(center - radius * width - 0.5f));
    const int last = clamp(std::floor(center + radius * width - 0.5f));
    const int count = std::min(last - first + 1, spans.most);
    float* const weights = spans.WeightsOf(out);
    float sum = 0;
    for (int i = 0; i < count; ++i) {
      const float offset = static_cast<float>(first + i) + 0.5f - center;
      sum += weights[i] = filter(std::abs(offset * inverse_width));
    }
    const float inverse_sum = 1.0f / sum;
    for (int i = 0; i < count; ++i) weights[i] *= inverse_sum;
    spans.first[out] = first;
    spans.count[out] = count;
  }
  return spans;
}

// ---- Bilinear ------------------------------------------------------------------------------------

// An output pixel is between an input pixel and the next one.
struct Position {
  int lower;
  float upper_weight;  // 0 at the image's borders
};

Position BetweenPixels(int out, int in_size, int out_size) {
  const float position = InputPosition(out, in_size, out_size);
  const float below = std::floor(position);
  const int lower = std::max(static_cast<int>(below), 0);
  const int upper = std::min(static_cast<int>(std::ceil(position)), in_size - 1);
  return {lower, upper > lower ? position - below : 0.0f};
}

void ToFloats(const uint8_t* from, int count, float* to) {
  int i = 0;
#ifdef __AVX2__
  // Compilers take more instructions.
  for (; i + 8 <= count; i += 8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)));
  }
#endif
  for (; i < count; ++i) to[i] = from[i];
}

// Two output pixels of a row, or one twice.
struct Columns {
  size_t lower[2];        // elements before the lower input pixels
  float upper_weight[8];  // four times that of each
};

std::vector<Columns> MakeColumns(int in_size, int out_size, bool flipped) {
  std::vector<Columns> columns((out_size + 1) / 2);
  for (int x = 0; x < 2 * static_cast<int>(columns.size()); ++x) {
    const int out = std::min(x, out_size - 1);
    const Position position = BetweenPixels(flipped ? out_size - 1 - out : out, in_size, out_size);
    Columns& two = columns[x / 2];
    two.lower[x % 2] = size_t{kColors} * position.lower;
    std::fill_n(two.upper_weight + x % 2 * 4, 4, position.upper_weight);
  }
  return columns;
}

// Interpolates along a row; each pixel is written with an element more.
void ResizeRow(const float* pixels, const std::vector<Columns>& columns, float* to) {
  for (const Columns& two : columns) {
#ifdef __AVX2__
    const auto load = [&](int distance) {
      const __m128 first = _mm_loadu_ps(pixels + two.lower[0] + distance);
      const __m128 second = _mm_loadu_ps(pixels + two.lower[1] + distance);
      return _mm256_insertf128_ps(_mm256_castps128_ps256(first), second, 1);
    };
    const __m256 lower = load(0), upper = load(kColors);
    const __m256 both = lower + (upper - lower) * _mm256_loadu_ps(two.upper_weight);
    _mm_storeu_ps(to, _mm256_castps256_ps128(both));
    _mm_storeu_ps(to + kColors, _mm256_extractf128_ps(both, 1));
#else
    for (int i = 0; i < 2; ++i) {
      const Pixel lower = Load(pixels + two.lower[i]), upper = Load(pixels + two.lower[i] + kColors);
      Store(lower + (upper - lower) * two.upper_weight[4 * i], to + i * kColors);
    }
#endif
    to += 2 * kColors;
  }
}

#ifdef __AVX512VBMI__

// Sixteen elements of an output row and the input elements, at most 64 in a row, that they are between.
struct alignas(64) Elements {
  int8_t places[16][4] = {};  // the first is that of the lower one among the 64, the third of the upper one
  float upper_weight[16];
  uint64_t inside;  // bits: which of the 64 are in the row
  size_t first;     // of the 64
};

// Returns nothing if sixteen elements need more than 64.
std::vector<Elements> MakeElements(int in_size, int out_size, bool flipped) {
  const int length = kColors * out_size;
  std::vector<Elements> all((length + 15) / 16);
  for (size_t i = 0; i < all.size(); ++i) {
    Elements& sixteen = all[i];
    int lower[16], upper[16];
    for (int j = 0; j < 16; ++j) {
      // The last sixteen may be fewer.
      const int element = std::min<int>(16 * i + j, length - 1), x = element / kColors;
      const Position position = BetweenPixels(flipped ? out_size - 1 - x : x, in_size, out_size);
      lower[j] = position.lower * kColors + element % kColors;
      upper[j] = lower[j] + (position.upper_weight != 0 ? kColors : 0);
      sixteen.upper_weight[j] = position.upper_weight;
    }
    const int first = *std::min_element(lower, lower + 16);
    if (*std::max_element(upper, upper + 16) - first >= 64) return {};
    for (int j = 0; j < 16; ++j) {
      sixteen.places[j][0] = lower[j] - first;
      sixteen.places[j][2] = upper[j] - first;
    }
    sixteen.first = first;
    sixteen.inside = ~uint64_t{0} >> std::max(64 - (kColors * in_size - first), 0);
  }
  return all;
}

// As the function of Columns. Differences of pixels are whole numbers, so floats hold them exactly.
void ResizeRow(const uint8_t* from, const std::vector<Elements>& all, float* to) {
  for (const Elements& sixteen : all) {
    const __m512i bytes = _mm512_maskz_loadu_epi8(sixteen.inside, from + sixteen.first);
    const __m512i places = _mm512_load_si512(sixteen.places);
    const __m512i both = _mm512_maskz_permutexvar_epi8(0x5555555555555555, places, bytes);
    const __m512i lower = _mm512_and_si512(both, _mm512_set1_epi32(0xFFFF));
    // The upper one times 1 and the lower one times -1.
    const __m512i difference = _mm512_madd_epi16(both, _mm512_set1_epi32(0x1FFFF));
    const __m512 product = _mm512_cvtepi32_ps(difference) * _mm512_load_ps(sixteen.upper_weight);
    _mm512_storeu_ps(to, _mm512_cvtepi32_ps(lower) + product);
    to += 16;
  }
}

#endif

// Interpolates along rows.
class RowResizer {
 public:
  RowResizer(int in_size, int out_size, bool flipped) : wide_(in_size * kColors) {
#ifdef __AVX512VBMI__
    elements_ = MakeElements(in_size, out_size, flipped);
    if (!elements_.empty()) return;
#endif
    columns_ = MakeColumns(in_size, out_size, flipped);
    floats_.resize(wide_ + kColors + kPadding);
  }

  // At most kMore elements more than those of the row are written.
  static constexpr int kMore = 15;
  void Resize(const uint8_t* from, float* to) {
#ifdef __AVX512VBMI__
    if (!elements_.empty()) return ResizeRow(from, elements_, to);
#endif
    ToFloats(from, wide_, floats_.data());
    ResizeRow(floats_.data(), columns_, to);
  }

 private:
  int wide_;
  std::vector<Columns> columns_;
  std::vector<float> floats_;
#ifdef __AVX512VBMI__
  std::vector<Elements> elements_;
#endif
};

// As TensorFlow's ResizeBilinear: first along rows, then between two rows.
void ResizeBilinear(const Image& image, int size, bool flipped, uint8_t* out) {
  RowResizer resizer(image.width, size, flipped);
  const int length = size * kColors;
  // The last two input rows that were resized, and their numbers.
  std::vector<float> resized[2];
  for (auto& row : resized) row.resize(length + RowResizer::kMore);
  int resized_row[2] = {-1, -1};
  for (int y = 0; y < size; ++y) {
    const Position position = BetweenPixels(y, image.height, size);
    const int rows[2] = {position.lower, std::min(position.lower + 1, image.height - 1)};
    if (resized_row[1] == rows[0]) {
      std::swap(resized_row[0], resized_row[1]);
      resized[0].swap(resized[1]);
    }
    for (int i = 0; i < 2; ++i) {
      if (resized_row[i] == rows[i]) continue;
      if (i == 1 && position.upper_weight == 0) continue;
      resized_row[i] = rows[i];
      resizer.Resize(image.row(rows[i]), resized[i].data());
    }
    const float* const lower = resized[0].data();
    const float* const upper = resized[1].data();
    const float upper_weight = position.upper_weight;
    for (int j = 0; j < length; ++j) {
      out[j] = static_cast<int>(lower[j] + (upper[j] - lower[j]) * upper_weight + 0.5f);
    }
    out += length;
  }
}

// ---- Spans of any length -------------------------------------------------------------------------

// Adds `count` weighted rows to sums, which are 0 before the first.
template <int count>
ALWAYS_INLINE void AddRows(const Image& image, int row, const float* weights, bool is_first,
                           float* __restrict sums) {
  const int wide = image.width * kColors;
  const uint8_t* from[count];
  float weight[count];
  for (int i = 0; i < count; ++i) {
    from[i] = image.row(row + i);
    weight[i] = weights[i];
  }
  for (int j = 0; j < wide; ++j) {
    float sum = is_first ? 0.0f : sums[j];
    for (int i = 0; i < count; ++i) sum += from[i][j] * weight[i];
    sums[j] = sum;
  }
}

// Sums weighted pixels of a row, `taps` for each column. Those beyond its span have no weight.
template <typename Taps>
ALWAYS_INLINE void SumColumns(const float* row, const Spans& columns, bool flipped, Taps taps,
                              float* to) {
  for (int x = 0; x < columns.size; ++x) {
    const int column = flipped ? columns.size - 1 - x : x;
    const float* const from = row + columns.first[column] * kColors;
    const float* const weights = columns.WeightsOf(column);
    Pixel sum = {};
    for (int i = 0; i < taps; ++i) sum += Load(from + i * kColors) * weights[i];
    Store(sum, to + x * kColors);
  }
}

// As above; the compiler unrolls the sums of up to `unrolled` taps.
template <int unrolled>
ALWAYS_INLINE void SumColumns(const float* row, const Spans& columns, bool flipped, int taps,
                              float* to) {
  if constexpr (unrolled == 0) {
    SumColumns(row, columns, flipped, taps, to);
  } else if (taps == unrolled) {
    SumColumns(row, columns, flipped, std::integral_constant<int, unrolled>(), to);
  } else {
    SumColumns<unrolled - 1>(row, columns, flipped, taps, to);
  }
}

// As TensorFlow's ResizeBicubic and ScaleAndTranslate: first between rows, then along the result.

void ResizeBySpans(const Image& image, bool flipped, const Spans& rows, const Spans& columns,
                   uint8_t* out) {
  const int size = rows.size;
  const int length = size * kColors;
  const int taps = *std::max_element(columns.count.begin(), columns.count.end());
  std::vector<float> between((image.width + taps) * kColors + kPadding);
  std::vector<float> resized(length + kPadding);
  float* const sums = between.data();
  float* const to = resized.data();
  for (int y = 0; y < size; ++y) {
    const float* const weights = rows.WeightsOf(y);
    for (int done = 0, left; (left = rows.count[y] - done) > 0; done += 4) {
      const int row = rows.first[y] + done;
      if (left >= 4) AddRows<4>(image, row, weights + done, !done, sums);
      if (left == 3) AddRows<3>(image, row, weights + done, !done, sums);
      if (left == 2) AddRows<2>(image, row, weights + done, !done, sums);
      if (left == 1) AddRows<1>(image, row, weights + done, !done, sums);
    }
    SumColumns<kUnrolled>(sums, columns, flipped, taps, to);
    // Cubic filters overshoot at edges.
    for (int j = 0; j < length; ++j) {
      out[j] = static_cast<int>(std::min(std::max(to[j] + 0.5f, 0.0f), 255.0f));
    }
    out += length;
  }
}

template <MakeSpans make_spans>
void ResizeWith(const Image& image, int size, bool flipped, uint8_t* out) {
  ResizeBySpans(image, flipped, make_spans(image.height, size), make_spans(image.width, size), out);
}

}  // namespace

Function* ForMethod(const char* method, bool antialias) {
  if (std::strcmp(method, "bicubic") == 0) {
    return antialias ? ResizeWith<WidenedSpans<Keys, 2>> : ResizeWith<CubicSpans>;
  }
  return antialias ? ResizeWith<WidenedSpans<Triangle, 1>> : ResizeBilinear;
}

}  // namespace resize
