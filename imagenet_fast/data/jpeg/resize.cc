#include "resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

// Compiles a function for AVX2 and for the baseline; the loader picks one.
#if defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_MACHINE __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_MACHINE
#endif

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

// The input pixels that an output pixel is a weighted mean of, along one axis.
struct LinearWeights {
  int index[2];
  float upper_weight;
};

struct CubicWeights {
  int index[4];
  float weights[4];
};

LinearWeights ComputeLinearWeights(int out, int in_size, int out_size) {
  const float position = InputPosition(out, in_size, out_size);
  const float below = std::floor(position);
  const int lower = std::max(static_cast<int>(below), 0);
  const int upper = std::min(static_cast<int>(std::ceil(position)), in_size - 1);
  return {{lower, upper}, position - below};
}

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

CubicWeights ComputeCubicWeights(int out, int in_size, int out_size) {
  static const std::vector<float>* const table = new std::vector<float>(CubicTable());
  const float position = InputPosition(out, in_size, out_size);
  const int below = static_cast<int>(std::floor(position));
  const int offset = static_cast<int>(std::lrint((position - below) * kTableSize));
  const int entries[4] = {2 * offset + 1, 2 * offset, 2 * (kTableSize - offset),
                          2 * (kTableSize - offset) + 1};
  CubicWeights cubic;
  float sum = 0;
  for (int i = 0; i < 4; ++i) {
    const int index = below - 1 + i;
    cubic.index[i] = std::clamp(index, 0, in_size - 1);
    // Pixels outside the image have no weight.
    cubic.weights[i] = cubic.index[i] == index ? (*table)[entries[i]] : 0.0f;
    sum += cubic.weights[i];
  }
  const float scale = 1.0f / sum;
  for (float& weight : cubic.weights) weight *= scale;
  return cubic;
}

// Returns the weights of the output's columns, with indices into a row of interleaved colors.
template <typename Weights>
std::vector<Weights> ColumnWeights(Weights (*compute)(int, int, int), int in_size, int out_size,
                                   bool flipped) {
  std::vector<Weights> columns(out_size);
  for (int x = 0; x < out_size; ++x) {
    columns[x] = compute(flipped ? out_size - 1 - x : x, in_size, out_size);
    for (int& index : columns[x].index) index *= kColors;
  }
  return columns;
}

// As TensorFlow's ResizeBilinear: first along rows, then between two rows.
FOR_EACH_MACHINE
void ResizeBilinear(const Image& image, int size, bool flipped, uint8_t* out) {
  const std::vector<LinearWeights> columns =
      ColumnWeights(ComputeLinearWeights, image.width, size, flipped);
  const int wide = image.width * kColors;
  const int length = size * kColors;
  std::vector<float> floats(wide + kPadding);
  // The last two input rows that were resized, and their numbers.
  std::vector<float> resized[2] = {std::vector<float>(length + kPadding),
                                   std::vector<float>(length + kPadding)};
  int resized_row[2] = {-1, -1};
  for (int y = 0; y < size; ++y) {
    const LinearWeights rows = ComputeLinearWeights(y, image.height, size);
    if (resized_row[1] == rows.index[0]) {
      std::swap(resized_row[0], resized_row[1]);
      resized[0].swap(resized[1]);
    }
    for (int i = 0; i < 2; ++i) {
      if (resized_row[i] == rows.index[i]) continue;
      resized_row[i] = rows.index[i];
      const uint8_t* const from = image.row(resized_row[i]);
      float* const pixels = floats.data();
      for (int j = 0; j < wide; ++j) pixels[j] = from[j];
      float* const to = resized[i].data();
      for (int x = 0; x < size; ++x) {
        const Pixel lower = Load(pixels + columns[x].index[0]);
        const Pixel upper = Load(pixels + columns[x].index[1]);
        Store(lower + (upper - lower) * columns[x].upper_weight, to + x * kColors);
      }
    }
    const float* const lower = resized[0].data();
    const float* const upper = resized[1].data();
    const float upper_weight = rows.upper_weight;
    for (int j = 0; j < length; ++j) {
      out[j] = static_cast<int>(lower[j] + (upper[j] - lower[j]) * upper_weight + 0.5f);
    }
    out += length;
  }
}

// As TensorFlow's ResizeBicubic: first between four rows, then along the result.
FOR_EACH_MACHINE
void ResizeBicubic(const Image& image, int size, bool flipped, uint8_t* out) {
  const std::vector<CubicWeights> columns =
      ColumnWeights(ComputeCubicWeights, image.width, size, flipped);
  const int wide = image.width * kColors;
  const int length = size * kColors;
  std::vector<float> between(wide + kPadding);
  std::vector<float> resized(length + kPadding);
  for (int y = 0; y < size; ++y) {
    const CubicWeights rows = ComputeCubicWeights(y, image.height, size);
    const uint8_t* from[4];
    for (int i = 0; i < 4; ++i) from[i] = image.row(rows.index[i]);
    float* const pixels = between.data();
    for (int j = 0; j < wide; ++j) {
      pixels[j] = from[0][j] * rows.weights[0] + from[1][j] * rows.weights[1] +
                  from[2][j] * rows.weights[2] + from[3][j] * rows.weights[3];
    }
    float* const to = resized.data();
    for (int x = 0; x < size; ++x) {
      const CubicWeights& column = columns[x];
      Store(Load(pixels + column.index[0]) * column.weights[0] +
                Load(pixels + column.index[1]) * column.weights[1] +
                Load(pixels + column.index[2]) * column.weights[2] +
                Load(pixels + column.index[3]) * column.weights[3],
            to + x * kColors);
    }
    // Cubic filters overshoot at edges.
    for (int j = 0; j < length; ++j) {
      out[j] = static_cast<int>(std::min(std::max(to[j] + 0.5f, 0.0f), 255.0f));
    }
    out += length;
  }
}

// With antialiasing, an output pixel is a weighted mean of a span of input pixels.
struct Span {
  int first;
  std::vector<float> weights;
};

float Triangle(float distance) { return std::max(1.0f - distance, 0.0f); }

// Keys' cubic kernel.
float Keys(float distance) {
  if (distance >= 2.0f) return 0.0f;
  if (distance >= 1.0f) return ((-0.5f * distance + 2.5f) * distance - 4.0f) * distance + 2.0f;
  return ((1.5f * distance - 2.5f) * distance) * distance + 1.0f;
}

// Returns the spans of all output pixels along an axis, for a filter that is widened when shrinking.
std::vector<Span> Spans(float (*filter)(float), float radius, int in_size, int out_size) {
  const float scale = static_cast<float>(out_size) / static_cast<float>(in_size);
  const float step = 1.0 / scale;
  const float width = std::max(step, 1.0f);
  const float inverse_width = 1.0f / width;
  std::vector<Span> spans(out_size);
  for (int out = 0; out < out_size; ++out) {
    const float center = (out + 0.5f) * step;
    const auto clamp = [in_size](float index) {
      return std::clamp(static_cast<int>(index), 0, in_size - 1);
    };
    const int first = clamp(std::ceil(center - radius * width - 0.5f));
    const int last = clamp(std::floor(center + radius * width - 0.5f));
    Span& span = spans[out];
    span.first = first;
    float sum = 0;
    for (int index = first; index <= last; ++index) {
      const float offset = static_cast<float>(index) + 0.5f - center;
      span.weights.push_back(filter(std::abs(offset * inverse_width)));
      sum += span.weights.back();
    }
    const float inverse_sum = 1.0f / sum;
    for (float& weight : span.weights) weight *= inverse_sum;
  }
  return spans;
}

// As TensorFlow's ScaleAndTranslate: first between rows, then along the result.
FOR_EACH_MACHINE
void ResizeAntialiased(const Image& image, int size, bool flipped, const std::vector<Span>& rows,
                       const std::vector<Span>& columns, uint8_t* out) {
  const int wide = image.width * kColors;
  std::vector<float> between(wide + kPadding);
  float* const pixels = between.data();
  float colors[kColors + kPadding];
  for (const Span& row : rows) {
    std::fill(between.begin(), between.end(), 0.0f);
    for (size_t i = 0; i < row.weights.size(); ++i) {
      const uint8_t* const from = image.row(row.first + i);
      const float weight = row.weights[i];
      for (int j = 0; j < wide; ++j) pixels[j] += from[j] * weight;
    }
    for (int x = 0; x < size; ++x) {
      const Span& column = columns[flipped ? size - 1 - x : x];
      const float* from = pixels + column.first * kColors;
      Pixel sum = {};
      for (const float weight : column.weights) {
        sum += Load(from) * weight;
        from += kColors;
      }
      Store(sum, colors);
      // Cubic filters overshoot at edges.
      for (int j = 0; j < kColors; ++j) {
        *out++ = static_cast<int>(std::min(std::max(colors[j] + 0.5f, 0.0f), 255.0f));
      }
    }
  }
}

void ResizeWithTriangle(const Image& image, int size, bool flipped, uint8_t* out) {
  ResizeAntialiased(image, size, flipped, Spans(Triangle, 1.0f, image.height, size),
                    Spans(Triangle, 1.0f, image.width, size), out);
}

void ResizeWithKeys(const Image& image, int size, bool flipped, uint8_t* out) {
  ResizeAntialiased(image, size, flipped, Spans(Keys, 2.0f, image.height, size),
                    Spans(Keys, 2.0f, image.width, size), out);
}

}  // namespace

Function* ForMethod(const char* method, bool antialias) {
  if (std::strcmp(method, "bicubic") == 0) return antialias ? ResizeWithKeys : ResizeBicubic;
  return antialias ? ResizeWithTriangle : ResizeBilinear;
}

}  // namespace resize
