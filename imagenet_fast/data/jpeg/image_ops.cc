// TensorFlow ops that read the examples of a batch of records, and make the batch's images; and one that
// indexes JPEGs.
//
// They work on a whole batch: no tensor, and no element of a dataset, is made for an image. Indexed JPEGs
// are decoded here where jpeg_window.h can, others and PNGs by TensorFlow's own functions: pixels are those
// of its ops either way.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "buffer.h"
#include "example.h"
#include "jpeg_cut.h"
#include "jpeg_index.h"
#include "jpeg_window.h"
#include "native_ops.h"
#include "pool.h"
#include "resize.h"
#include "tensorflow/core/lib/jpeg/jpeg_mem.h"
#include "tensorflow/core/lib/png/png_io.h"
#include "tensorflow/core/platform/ctstring.h"

namespace {

using jpeg::Bytes;

constexpr uint8_t kJpegSignature[] = {0xff, 0xd8, 0xff};
// The first chunk of every PNG has 13 bytes, which start with the width and the height.
constexpr uint8_t kPngBegin[] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n', 0, 0, 0, 13,
                                 'I',  'H', 'D', 'R'};
constexpr size_t kPngSize = sizeof(kPngBegin) + 8;
// Those of TensorFlow's op.
constexpr int64_t kMostPngSide = int64_t{1} << 27, kMostPngPixels = int64_t{1} << 29;
// Of an image: no size in a record above it is true, and sums of two fit into 32 bits.
constexpr int32_t kMostSide = 1 << 24;

constexpr int kBox = 4;
// Numbers that say where the encoded image and its index are in a record: two places and sizes.
constexpr int kPlaces = 4;

const TF_TString* Strings(const Tensor& tensor) {
  return static_cast<const TF_TString*>(TF_TensorData(tensor.get()));
}

Bytes ToBytes(const TF_TString& text) {
  return {reinterpret_cast<const uint8_t*>(TF_TString_GetDataPointer(&text)),
          TF_TString_GetSize(&text)};
}

template <typename T>
T* Data(const Tensor& tensor) {
  return static_cast<T*>(TF_TensorData(tensor.get()));
}

template <typename T>
Tensor Allocate(TF_OpKernelContext* context, int index, TF_DataType type,
                const std::vector<int64_t>& shape, const Status& status) {
  size_t bytes = sizeof(T);
  for (const int64_t size : shape) bytes *= size;
  return Tensor(TF_AllocateOutput(context, index, type, shape.data(), shape.size(), bytes,
                                  status.get()));
}

bool IsJpeg(Bytes image) {
  return image.size >= sizeof(kJpegSignature) &&
         std::memcmp(image.data, kJpegSignature, sizeof(kJpegSignature)) == 0;
}

int32_t BigEndian(const uint8_t* bytes) {
  return static_cast<int32_t>(uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 |
                              uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]});
}

struct Size {
  int32_t height, width;
};

bool IsSide(int64_t length) { return length > 0 && length <= kMostSide; }

bool Fits(Size size, int64_t most_pixels) {
  return size.height > 0 && size.width > 0 &&
         int64_t{size.height} * int64_t{size.width} <= most_pixels;
}

// Reads an image's size from its header; false if it is not a JPEG or PNG, or too large.
bool ReadSize(Bytes image, int64_t most_pixels, Size* size, bool* is_cmyk) {
  *is_cmyk = false;
  if (IsJpeg(image)) {
    int width, height, components;
    if (image.size > INT32_MAX ||
        !tensorflow::jpeg::GetImageInfo(image.data, static_cast<int>(image.size), &width, &height,
                                        &components)) {
      return false;
    }
    *size = {height, width};
    *is_cmyk = components == 4;
  } else if (image.size >= kPngSize &&
             std::memcmp(image.data, kPngBegin, sizeof(kPngBegin)) == 0) {
    const uint8_t* const sides = image.data + sizeof(kPngBegin);
    *size = {BigEndian(sides + 4), BigEndian(sides)};
  } else {
    return false;
  }
  return Fits(*size, most_pixels);
}

// ---- Indexes -------------------------------------------------------------------------------------

// Indexes of JPEGs, in a tensor of any shape; empty strings for images that cannot be indexed.
void IndexJpegs(TF_OpKernelContext* context, const Status& status) {
  const Tensor jpegs = Input(context, 0, status);
  if (!IsOk(status)) return;
  std::vector<int64_t> shape;
  for (int i = 0; i < TF_NumDims(jpegs.get()); ++i) shape.push_back(TF_Dim(jpegs.get(), i));
  const Tensor indexes = Allocate<TF_TString>(context, 0, TF_STRING, shape, status);
  if (!IsOk(status)) return;
  std::vector<uint8_t> index;
  for (int64_t i = 0; i < TF_TensorElementCount(jpegs.get()); ++i) {
    if (jpeg::MakeIndex(ToBytes(Strings(jpegs)[i]), &index) != jpeg::Result::kOk) {
      index.clear();
    }
    TF_TString_Copy(Data<TF_TString>(indexes) + i, reinterpret_cast<const char*>(index.data()),
                    index.size());
  }
}

void ComputeIndexes(void*, TF_OpKernelContext* context) {
  const Status status(TF_NewStatus());
  IndexJpegs(context, status);
  if (!IsOk(status)) TF_OpKernelContext_Failure(context, status.get());
}

// ---- Examples ------------------------------------------------------------------------------------

struct ExamplesKernel {
  int64_t most_pixels;
  bool from_headers;
  bool with_label;
  bool with_index;
};

void* CreateExamplesKernel(TF_OpKernelConstruction* construction) {
  const Status status(TF_NewStatus());
  auto kernel = std::make_unique<ExamplesKernel>();
  unsigned char from_headers = 0, with_label = 0, with_index = 0;
  TF_OpKernelConstruction_GetAttrInt64(construction, "max_pixels", &kernel->most_pixels,
                                       status.get());
  if (IsOk(status)) {
    TF_OpKernelConstruction_GetAttrBool(construction, "from_headers", &from_headers, status.get());
  }
  if (IsOk(status)) {
    TF_OpKernelConstruction_GetAttrBool(construction, "with_label", &with_label, status.get());
  }
  if (IsOk(status)) {
    TF_OpKernelConstruction_GetAttrBool(construction, "with_index", &with_index, status.get());
  }
  if (!IsOk(status)) TF_OpKernelConstruction_Failure(construction, status.get());
  kernel->from_headers = from_headers;
  kernel->with_label = with_label;
  kernel->with_index = with_index;
  return kernel.release();
}

void ReadExamples(const ExamplesKernel& kernel, TF_OpKernelContext* context, const Status& status) {
  const Tensor records = Input(context, 0, status);
  if (!IsOk(status)) return;
  const int64_t count = TF_TensorElementCount(records.get());
  if (TF_NumDims(records.get()) != 1) {
    return TF_SetStatus(status.get(), TF_INVALID_ARGUMENT, "records must be [length]");
  }
  const Tensor labels = Allocate<int64_t>(context, 0, TF_INT64, {count}, status);
  if (!IsOk(status)) return;
  const Tensor sizes = Allocate<Size>(context, 1, TF_INT32, {count, 2}, status);
  if (!IsOk(status)) return;
  const Tensor places = Allocate<int64_t>(context, 2, TF_INT64, {count, kPlaces}, status);
  if (!IsOk(status)) return;
  bool told = !kernel.from_headers;
  for (int64_t i = 0; i < count; ++i) {
    const Bytes record = ToBytes(Strings(records)[i]);
    example::Example read;
    if (!example::Read(record.data, record.size, kernel.with_label, kernel.with_index, &read)) {
      return TF_SetStatus(status.get(), TF_INVALID_ARGUMENT,
                          ("record " + std::to_string(i) + " of the batch has no usual layout").c_str());
    }
    Data<int64_t>(labels)[i] = read.label;
    Data<Size>(sizes)[i] = {static_cast<int32_t>(read.height), static_cast<int32_t>(read.width)};
    told = told && IsSide(read.height) && IsSide(read.width);
    int64_t* const place = Data<int64_t>(places) + kPlaces * i;
    place[0] = read.encoded.data ? read.encoded.data - record.data : 0;
    place[1] = read.encoded.size;
    place[2] = read.index.data ? read.index.data - record.data : 0;
    place[3] = read.index.size;
  }
  // If one size is missing, all are from headers.
  for (int64_t i = 0; i < count && !told; ++i) {
    const int64_t* const place = Data<int64_t>(places) + kPlaces * i;
    const Bytes image = {ToBytes(Strings(records)[i]).data + place[0],
                         static_cast<size_t>(place[1])};
    bool is_cmyk;
    // Evaluation marks CMYK JPEGs; this op changes no image.
    if (!ReadSize(image, kernel.most_pixels, Data<Size>(sizes) + i, &is_cmyk) ||
        (kernel.from_headers && is_cmyk)) {
      return TF_SetStatus(status.get(), TF_INVALID_ARGUMENT,
                          ("image " + std::to_string(i) + " of the batch has no usual header").c_str());
    }
  }
}

// ---- Images --------------------------------------------------------------------------------------

struct ImagesKernel {
  int size;
  int threads;
  resize::Function* resize;
  int64_t most_pixels;
};

void* CreateImagesKernel(TF_OpKernelConstruction* construction) {
  const Status status(TF_NewStatus());
  int64_t size = 0, threads = 0, most_pixels = 0;
  char method[16] = "";
  unsigned char antialias = 0;
  const struct {
    const char* name;
    int64_t* value;
  } numbers[] = {{"size", &size}, {"threads", &threads}, {"max_pixels", &most_pixels}};
  for (const auto& number : numbers) {
    if (IsOk(status)) {
      TF_OpKernelConstruction_GetAttrInt64(construction, number.name, number.value, status.get());
    }
  }
  if (IsOk(status)) {
    TF_OpKernelConstruction_GetAttrString(construction, "method", method, sizeof(method) - 1,
                                          status.get());
  }
  if (IsOk(status)) {
    TF_OpKernelConstruction_GetAttrBool(construction, "antialias", &antialias, status.get());
  }
  if (!IsOk(status)) TF_OpKernelConstruction_Failure(construction, status.get());
  return new ImagesKernel{static_cast<int>(size),
                          static_cast<int>(threads),
                          resize::ForMethod(method, antialias),
                          most_pixels};
}

struct Box {
  int32_t top, left, height, width;
};

bool IsInside(const Box& box, int height, int width) {
  return box.top >= 0 && box.left >= 0 && box.height > 0 && box.width > 0 &&
         box.top <= height - box.height && box.left <= width - box.width;
}

// A decoded image.
struct Pixels {
  const uint8_t* data;
  int height, width;
};

// Decodes a JPEG, or only a box of it.
bool DecodeJpeg(Bytes jpeg, const Box* crop, Buffer* buffer, Pixels* pixels) {
  if (jpeg.size > INT32_MAX) return false;
  tensorflow::jpeg::UncompressFlags flags;
  flags.components = resize::kColors;
  flags.dct_method = JDCT_ISLOW;
  if (crop) {
    flags.crop = true;
    flags.crop_y = crop->top;
    flags.crop_x = crop->left;
    flags.crop_height = crop->height;
    flags.crop_width = crop->width;
  }
  const auto allocate = [buffer, pixels](int width, int height, int components) -> uint8_t* {
    if (components != resize::kColors || width <= 0 || height <= 0) return nullptr;
    uint8_t* const data = buffer->Get(static_cast<size_t>(width) * height * components);
    *pixels = {data, height, width};
    return data;
  };
  return tensorflow::jpeg::Uncompress(jpeg.data, static_cast<int>(jpeg.size), flags, nullptr,
                                      allocate) != nullptr;
}

bool DecodePng(const ImagesKernel& kernel, Bytes png, Buffer* buffer, Pixels* pixels) {
  Size size;
  bool is_cmyk;
  if (!ReadSize(png, kernel.most_pixels, &size, &is_cmyk)) return false;
  tensorflow::png::DecodeContext decoder;
  if (!tensorflow::png::CommonInitDecode(
          {reinterpret_cast<const char*>(png.data), png.size}, resize::kColors, 8, &decoder)) {
    return false;
  }
  const int64_t height = decoder.height, width = decoder.width;
  uint8_t* const data = height > 0 && width > 0 && height < kMostPngSide && width < kMostPngSide &&
                                height * width < kMostPngPixels
                            ? buffer->Get(height * width * resize::kColors)
                            : nullptr;
  if (!data) {
    tensorflow::png::CommonFreeDecode(&decoder);
    return false;
  }
  *pixels = {data, static_cast<int>(height), static_cast<int>(width)};
  return tensorflow::png::CommonFinishDecode(data, static_cast<int>(width) * resize::kColors,
                                             &decoder);
}

// Decodes only the blocks around a window; no pixels if they are damaged.
jpeg::Result DecodeIndexed(const jpeg::IndexedJpeg& indexed, const jpeg::Window& window,
                           Buffer* memory, Buffer* decoded, Pixels* pixels, Box* inner) {
  const int height = static_cast<int>(window.height), width = static_cast<int>(window.width);
  uint8_t* to = decoded->Get(size_t{resize::kColors} * height * width);
  if (!to) return jpeg::Result::kNoRoom;
  if (jpeg::DecodeWindow(indexed, window, memory, to) == jpeg::Result::kOk) {
    *pixels = {to, height, width};
    *inner = {0, 0, height, width};
    return jpeg::Result::kOk;
  }
  const size_t most = jpeg::MostCutBytes(indexed.jpeg.size);
  to = memory->Get(most);
  if (!to) return jpeg::Result::kNoRoom;
  jpeg::Cut cut;
  const jpeg::Result result = jpeg::CutWindow(indexed, window, to, most, &cut);
  if (result != jpeg::Result::kOk) return result;
  *inner = {static_cast<int32_t>(window.top - cut.top), static_cast<int32_t>(window.left - cut.left),
            height, width};
  if (!DecodeJpeg({to, cut.size}, nullptr, decoded, pixels)) *pixels = {};
  return jpeg::Result::kOk;
}

// Decodes a crop of an image, resizes it and flips it. `misfit`: the index is not the image's.
bool MakeImage(const ImagesKernel& kernel, Bytes image, Bytes index, const Box& box, bool flipped,
               uint8_t* out, bool* misfit) {
  static thread_local Buffer memory, decoded;
  *misfit = false;
  // TensorFlow's decoder ends the process if a sum overflows.
  if (box.top < 0 || box.left < 0 || box.top > kMostSide || box.left > kMostSide ||
      !IsSide(box.height) || !IsSide(box.width)) {
    return false;
  }
  Pixels pixels = {};
  Box inner = {0, 0, 0, 0};
  bool ok = false;
  if (IsJpeg(image)) {
    jpeg::Result result = jpeg::Result::kUnsupported;
    if (index.size) {
      const jpeg::Window window = {box.top, box.left, box.height, box.width};
      jpeg::IndexedJpeg indexed;
      result = indexed.Open(image, index, window);
      if (result == jpeg::Result::kOk) {
        result = DecodeIndexed(indexed, window, &memory, &decoded, &pixels, &inner);
      }
      *misfit = result == jpeg::Result::kBadIndex;
    }
    if (result == jpeg::Result::kOk) {
      ok = pixels.data;
    } else {
      inner = {0, 0, box.height, box.width};
      ok = DecodeJpeg(image, &box, &decoded, &pixels);
    }
  } else {
    inner = box;
    ok = DecodePng(kernel, image, &decoded, &pixels);
  }
  ok = ok && IsInside(inner, pixels.height, pixels.width);
  if (ok) {
    const size_t first = static_cast<size_t>(inner.top) * pixels.width + inner.left;
    kernel.resize({pixels.data + first * resize::kColors, inner.height, inner.width, pixels.width},
                  kernel.size, flipped, out);
  }
  memory.Release();
  decoded.Release();
  return ok;
}

void MakeImages(const ImagesKernel& kernel, TF_OpKernelContext* context, const Status& status) {
  Tensor inputs[4];
  for (int i = 0; i < 4; ++i) {
    inputs[i] = Input(context, i, status);
    if (!IsOk(status)) return;
  }
  const Tensor &records = inputs[0], &places = inputs[1], &boxes = inputs[2], &flipped = inputs[3];
  const int64_t count = TF_TensorElementCount(records.get());
  if (TF_NumDims(records.get()) != 1 || TF_TensorElementCount(places.get()) != kPlaces * count ||
      TF_TensorElementCount(boxes.get()) != kBox * count ||
      TF_TensorElementCount(flipped.get()) != count) {
    return TF_SetStatus(status.get(), TF_INVALID_ARGUMENT,
                        "records and flipped must be of one length, places and boxes [length, 4]");
  }
  const Tensor images = Allocate<uint8_t>(
      context, 0, TF_UINT8, {count, kernel.size, kernel.size, resize::kColors}, status);
  if (!IsOk(status)) return;
  const Tensor misfits = Allocate<bool>(context, 1, TF_BOOL, {count}, status);
  if (!IsOk(status)) return;
  const size_t bytes = size_t{resize::kColors} * kernel.size * kernel.size;
  std::atomic<int64_t> failed{count};
  pool::Run(count, kernel.threads, [&](int64_t i) {
    const Bytes record = ToBytes(Strings(records)[i]);
    const int64_t* const place = Data<const int64_t>(places) + kPlaces * i;
    const auto part = [&](const int64_t* where, Bytes* found) {
      const uint64_t begin = where[0], size = where[1];
      *found = {record.data + begin, static_cast<size_t>(size)};
      return begin <= record.size && size <= record.size - begin;
    };
    Bytes image, index;
    if (!part(place, &image) || !part(place + 2, &index) ||
        !MakeImage(kernel, image, index, Data<const Box>(boxes)[i], Data<const bool>(flipped)[i],
                   Data<uint8_t>(images) + bytes * i, Data<bool>(misfits) + i)) {
      failed = i;
    }
  });
  if (failed < count) {
    const std::string text = "image " + std::to_string(failed) + " of the batch cannot be decoded";
    TF_SetStatus(status.get(), TF_INVALID_ARGUMENT, text.c_str());
  }
}

template <typename Kernel, void (*compute)(const Kernel&, TF_OpKernelContext*, const Status&)>
void Compute(void* kernel, TF_OpKernelContext* context) {
  const Status status(TF_NewStatus());
  compute(*static_cast<const Kernel*>(kernel), context, status);
  if (!IsOk(status)) TF_OpKernelContext_Failure(context, status.get());
}

template <typename Kernel>
void Delete(void* kernel) {
  delete static_cast<Kernel*>(kernel);
}

__attribute__((constructor)) void Register() {
  RegisterOp("ImagenetFastIndexJpegs", {"jpegs: string"}, {"indexes: string"}, {}, UnknownShape,
             nullptr, ComputeIndexes, nullptr);
  RegisterOp("ImagenetFastReadExamples", {"records: string"},
             {"labels: int64", "sizes: int32", "places: int64"},
             {"max_pixels: int >= 1", "from_headers: bool", "with_label: bool", "with_index: bool"},
             UnknownShape, CreateExamplesKernel,
             Compute<ExamplesKernel, ReadExamples>, Delete<ExamplesKernel>);
  RegisterOp("ImagenetFastMakeImages",
             {"records: string", "places: int64", "boxes: int32", "flipped: bool"},
             {"images: uint8", "misfits: bool"},
             {"size: int >= 1", "threads: int >= 1", "method: {'bilinear', 'bicubic'}", "antialias: bool",
              "max_pixels: int >= 1"},
             UnknownShape, CreateImagesKernel, Compute<ImagesKernel, MakeImages>,
             Delete<ImagesKernel>);
}

}  // namespace
