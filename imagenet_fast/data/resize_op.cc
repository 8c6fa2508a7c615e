// An op that resizes uint8 images as TensorFlow's ResizeBilinear and ResizeBicubic do with
// half_pixel_centers, or with antialiasing as its ScaleAndTranslate does, rounds to uint8, and flips
// on the way.
//
// Every float is computed as TensorFlow computes it, in the same order, so that pixels are equal to
// the last bit; but a line at a time, where the compiler can use vectors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "native_ops.h"

// Two versions of what takes the time, of which the machine's better one is taken.
#if defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_MACHINE __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_MACHINE
#endif

namespace {

constexpr int kColors = 3;
// Of TensorFlow's table of cubic weights.
constexpr int kTableSize = 1 << 10;

// One pixel and the first colour of its neighbour.
typedef float Pixel __attribute__((vector_size(16), aligned(4)));
constexpr int kMore = 1;

inline Pixel Load(const float* from) { return *reinterpret_cast<const Pixel*>(from); }
inline void Store(Pixel pixel, float* to) { *reinterpret_cast<Pixel*>(to) = pixel; }

// Where a pixel of the output lies among those of the input.
inline float Place(int out, int in_size, int out_size) {
  const float scale = static_cast<float>(in_size) / static_cast<float>(out_size);
  return (static_cast<float>(out) + 0.5f) * scale - 0.5f;
}

// The pixels of the input that make one of the output, and their shares in it.
struct Linear {
  int at[2];
  float upper_share;
};

struct Cubic {
  int at[4];
  float shares[4];
};

Linear LinearAt(int out, int in_size, int out_size) {
  const float place = Place(out, in_size, out_size);
  const float below = std::floor(place);
  const int lower = std::max(static_cast<int>(below), 0);
  const int upper = std::min(static_cast<int>(std::ceil(place)), in_size - 1);
  return {{lower, upper}, place - below};
}

// Returns Keys' cubic kernel at i / kTableSize and, behind each, one pixel further.
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

Cubic CubicAt(int out, int in_size, int out_size) {
  static const std::vector<float>* const table = new std::vector<float>(CubicTable());
  const float place = Place(out, in_size, out_size);
  const int below = static_cast<int>(std::floor(place));
  const int offset = static_cast<int>(std::lrint((place - below) * kTableSize));
  const int entries[4] = {2 * offset + 1, 2 * offset, 2 * (kTableSize - offset),
                          2 * (kTableSize - offset) + 1};
  Cubic cubic;
  float sum = 0;
  for (int i = 0; i < 4; ++i) {
    const int at = below - 1 + i;
    cubic.at[i] = std::clamp(at, 0, in_size - 1);
    // What lies outside has no share.
    cubic.shares[i] = cubic.at[i] == at ? (*table)[entries[i]] : 0.0f;
    sum += cubic.shares[i];
  }
  const float scale = 1.0f / sum;
  for (float& share : cubic.shares) share *= scale;
  return cubic;
}

// Returns those of all columns of the output, in its order.
template <typename Weights>
std::vector<Weights> Columns(Weights (*weights_at)(int, int, int), int in_size, int out_size,
                             bool flipped) {
  std::vector<Weights> columns(out_size);
  for (int x = 0; x < out_size; ++x) {
    columns[x] = weights_at(flipped ? out_size - 1 - x : x, in_size, out_size);
    for (int& at : columns[x].at) at *= kColors;
  }
  return columns;
}

struct Image {
  const uint8_t* pixels;
  int height;
  int width;

  const uint8_t* line(int y) const {
    return pixels + static_cast<size_t>(y) * width * kColors;
  }
};

// As TensorFlow: first along the lines, then between two of them.
FOR_EACH_MACHINE
void ResizeBilinear(const Image& image, int size, bool flipped, uint8_t* out) {
  const std::vector<Linear> columns = Columns(LinearAt, image.width, size, flipped);
  const int wide = image.width * kColors;
  const int length = size * kColors;
  std::vector<float> floats(wide + kMore);
  std::vector<float> lines[2] = {std::vector<float>(length + kMore),
                                 std::vector<float>(length + kMore)};
  int held[2] = {-1, -1};
  for (int y = 0; y < size; ++y) {
    const Linear row = LinearAt(y, image.height, size);
    if (held[1] == row.at[0]) {
      std::swap(held[0], held[1]);
      lines[0].swap(lines[1]);
    }
    for (int i = 0; i < 2; ++i) {
      if (held[i] == row.at[i]) continue;
      held[i] = row.at[i];
      const uint8_t* const from = image.line(held[i]);
      float* const pixels = floats.data();
      for (int j = 0; j < wide; ++j) pixels[j] = from[j];
      float* const to = lines[i].data();
      for (int x = 0; x < size; ++x) {
        const Pixel lower = Load(pixels + columns[x].at[0]);
        const Pixel upper = Load(pixels + columns[x].at[1]);
        Store(lower + (upper - lower) * columns[x].upper_share, to + x * kColors);
      }
    }
    const float* const lower = lines[0].data();
    const float* const upper = lines[1].data();
    const float share = row.upper_share;
    for (int j = 0; j < length; ++j) {
      out[j] = static_cast<int>(lower[j] + (upper[j] - lower[j]) * share + 0.5f);
    }
    out += length;
  }
}

// As TensorFlow: first between four lines, then along.
FOR_EACH_MACHINE
void ResizeBicubic(const Image& image, int size, bool flipped, uint8_t* out) {
  const std::vector<Cubic> columns = Columns(CubicAt, image.width, size, flipped);
  const int wide = image.width * kColors;
  const int length = size * kColors;
  std::vector<float> between(wide + kMore);
  std::vector<float> line(length + kMore);
  for (int y = 0; y < size; ++y) {
    const Cubic row = CubicAt(y, image.height, size);
    const uint8_t* from[4];
    for (int i = 0; i < 4; ++i) from[i] = image.line(row.at[i]);
    float* const pixels = between.data();
    for (int j = 0; j < wide; ++j) {
      pixels[j] = from[0][j] * row.shares[0] + from[1][j] * row.shares[1] +
                  from[2][j] * row.shares[2] + from[3][j] * row.shares[3];
    }
    float* const to = line.data();
    for (int x = 0; x < size; ++x) {
      const Cubic& column = columns[x];
      Store(Load(pixels + column.at[0]) * column.shares[0] +
                Load(pixels + column.at[1]) * column.shares[1] +
                Load(pixels + column.at[2]) * column.shares[2] +
                Load(pixels + column.at[3]) * column.shares[3],
            to + x * kColors);
    }
    // It overshoots at edges.
    for (int j = 0; j < length; ++j) {
      out[j] = static_cast<int>(std::min(std::max(to[j] + 0.5f, 0.0f), 255.0f));
    }
    out += length;
  }
}

// With antialiasing any number of pixels make one of the output.
struct Span {
  int first;
  std::vector<float> shares;
};

float Triangle(float distance) { return std::max(1.0f - distance, 0.0f); }

// Keys' kernel.
float Keys(float distance) {
  if (distance >= 2.0f) return 0.0f;
  if (distance >= 1.0f) return ((-0.5f * distance + 2.5f) * distance - 4.0f) * distance + 2.0f;
  return ((1.5f * distance - 2.5f) * distance) * distance + 1.0f;
}

// Returns those of all pixels of the output, of a filter that becomes wider as the image becomes
// smaller.
std::vector<Span> Spans(float (*filter)(float), float radius, int in_size, int out_size) {
  const float scale = static_cast<float>(out_size) / static_cast<float>(in_size);
  const float step = 1.0 / scale;
  const float width = std::max(step, 1.0f);
  const float inverse_width = 1.0f / width;
  std::vector<Span> spans(out_size);
  for (int out = 0; out < out_size; ++out) {
    const float place = (out + 0.5f) * step;
    const auto inside = [in_size](float at) {
      return std::clamp(static_cast<int>(at), 0, in_size - 1);
    };
    const int first = inside(std::ceil(place - radius * width - 0.5f));
    const int last = inside(std::floor(place + radius * width - 0.5f));
    Span& span = spans[out];
    span.first = first;
    float sum = 0;
    for (int at = first; at <= last; ++at) {
      const float offset = static_cast<float>(at) + 0.5f - place;
      span.shares.push_back(filter(std::abs(offset * inverse_width)));
      sum += span.shares.back();
    }
    const float inverse_sum = 1.0f / sum;
    for (float& share : span.shares) share *= inverse_sum;
  }
  return spans;
}

// As TensorFlow: first between lines, then along.
FOR_EACH_MACHINE
void ResizeAntialiased(const Image& image, int size, bool flipped, const std::vector<Span>& rows,
                       const std::vector<Span>& columns, uint8_t* out) {
  const int wide = image.width * kColors;
  std::vector<float> between(wide + kMore);
  float* const pixels = between.data();
  float colors[kColors + kMore];
  for (const Span& row : rows) {
    std::fill(between.begin(), between.end(), 0.0f);
    for (size_t i = 0; i < row.shares.size(); ++i) {
      const uint8_t* const from = image.line(row.first + i);
      const float share = row.shares[i];
      for (int j = 0; j < wide; ++j) pixels[j] += from[j] * share;
    }
    for (int x = 0; x < size; ++x) {
      const Span& column = columns[flipped ? size - 1 - x : x];
      const float* from = pixels + column.first * kColors;
      Pixel sum = {};
      for (const float share : column.shares) {
        sum += Load(from) * share;
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

struct Kernel {
  int size;
  void (*resize)(const Image&, int, bool, uint8_t*);
};

void* CreateKernel(TF_OpKernelConstruction* construction) {
  const Status status(TF_NewStatus());
  int64_t size = 0;
  char method[16] = "";
  TF_OpKernelConstruction_GetAttrInt64(construction, "size", &size, status.get());
  if (IsOk(status)) {
    TF_OpKernelConstruction_GetAttrString(construction, "method", method, sizeof(method) - 1,
                                          status.get());
  }
  unsigned char antialias = 0;
  if (IsOk(status)) {
    TF_OpKernelConstruction_GetAttrBool(construction, "antialias", &antialias, status.get());
  }
  if (!IsOk(status)) TF_OpKernelConstruction_Failure(construction, status.get());
  if (std::strcmp(method, "bicubic") == 0) {
    return new Kernel{static_cast<int>(size), antialias ? ResizeWithKeys : ResizeBicubic};
  }
  return new Kernel{static_cast<int>(size), antialias ? ResizeWithTriangle : ResizeBilinear};
}

void DeleteKernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

void Resize(const Kernel& kernel, TF_OpKernelContext* context, const Status& status) {
  const Tensor image = Input(context, 0, status);
  if (!IsOk(status)) return;
  const Tensor flipped = Input(context, 1, status);
  if (!IsOk(status)) return;
  if (TF_NumDims(image.get()) != 3 || TF_Dim(image.get(), 2) != kColors ||
      TF_TensorElementCount(image.get()) == 0 || TF_NumDims(flipped.get()) != 0) {
    TF_SetStatus(status.get(), TF_INVALID_ARGUMENT,
                 "image must be [height, width, 3] and not empty, flipped a scalar");
    return;
  }
  const int64_t shape[] = {kernel.size, kernel.size, kColors};
  const size_t bytes = shape[0] * shape[1] * shape[2];
  const Tensor resized(
      TF_AllocateOutput(context, 0, TF_UINT8, shape, 3, bytes, status.get()));
  if (!IsOk(status)) return;
  const Image pixels = {static_cast<const uint8_t*>(TF_TensorData(image.get())),
                        static_cast<int>(TF_Dim(image.get(), 0)),
                        static_cast<int>(TF_Dim(image.get(), 1))};
  kernel.resize(pixels, kernel.size, *static_cast<const bool*>(TF_TensorData(flipped.get())),
                static_cast<uint8_t*>(TF_TensorData(resized.get())));
}

void Compute(void* kernel, TF_OpKernelContext* context) {
  const Status status(TF_NewStatus());
  Resize(*static_cast<const Kernel*>(kernel), context, status);
  if (!IsOk(status)) TF_OpKernelContext_Failure(context, status.get());
}

void InferShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

__attribute__((constructor)) void Register() {
  const char* const name = "ImagenetFastResize";
  TF_OpDefinitionBuilder* const op = TF_NewOpDefinitionBuilder(name);
  TF_OpDefinitionBuilderAddInput(op, "image: uint8");
  TF_OpDefinitionBuilderAddInput(op, "flipped: bool");
  TF_OpDefinitionBuilderAddOutput(op, "resized: uint8");
  TF_OpDefinitionBuilderAddAttr(op, "size: int >= 1");
  TF_OpDefinitionBuilderAddAttr(op, "method: {'bilinear', 'bicubic'}");
  TF_OpDefinitionBuilderAddAttr(op, "antialias: bool");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, InferShape);
  const Status status(TF_NewStatus());
  TF_RegisterOpDefinition(op, status.get());
  if (!IsOk(status)) return;  // Then loading it finds no op.
  TF_RegisterKernelBuilder(name, TF_NewKernelBuilder(name, "CPU", CreateKernel, Compute, DeleteKernel),
                           status.get());
}

}  // namespace
