#include "jpeg_window.h"

#ifdef __AVX2__

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "idct.h"
#include "rgb.h"

namespace jpeg {
namespace {

// TensorFlow's decoder refuses as many, too.
constexpr int64_t kMostSamples = int64_t{1} << 29;

// A component's samples around the window.
struct Plane {
  int64_t top, left, bottom, right;  // in samples, of whole blocks; the last two exclusive
  int64_t rows, columns;             // samples of the whole image
  size_t stride;
  uint8_t* samples;
  alignas(Vector) int16_t quantization[kCoefficients];  // by kPlaces

  uint8_t* At(int64_t y, int64_t x) const { return samples + (y - top) * stride + (x - left); }
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
            if (std::abs(dc[number]) > kMostDc) return Result::kCorrupt;
            const CodeTable& table = header.ac_table(number);
            if (y < plane.top || y >= plane.bottom || x < plane.left || x >= plane.right) {
              if (!SkipAc(table, &bits)) return Result::kCorrupt;
              continue;
            }
            int16_t* const coefficients = idct_.coefficients();
            coefficients[0] = dc[number];
            const int last = ReadBlock(table, &bits, coefficients);
            if (last < 0) return Result::kCorrupt;
            idct_.Make(plane.quantization, last, plane.At(y, x), plane.stride);
          }
        }
      }
      if (++column == header.columns) {
        column = 0;
        ++row;
      }
    }
    // The next run is then what follows it.
    const bool ends = bits.position() == run.end &&
                      std::equal(dc, dc + header.components, run.dc_after);
    return ends ? Result::kOk : Result::kCorrupt;
  }

  bool wild() const { return idct_.wild(); }

 private:
  // Reads the AC coefficients of a block; returns the place of the last one, 0 without any, or -1 if they are
  // invalid. A function of its own has enough registers.
  __attribute__((noinline)) static int ReadBlock(const CodeTable& table, BitReader* bits,
                                                 int16_t* coefficients) {
    int last = 0;
    const auto take = [&](int place, int value) {
      coefficients[kPlaces.at[place]] = value;
      last = place;
    };
    return ReadAc(table, bits, take) ? last : -1;
  }

  const IndexedJpeg& jpeg_;
  const Plane* planes_;
  Idct idct_;
};

// ---- Pixels --------------------------------------------------------------------------------------

// Memory for a row of chroma, and for kWords numbers more in each part.
struct ChromaRow {
  int16_t* sums;
  uint8_t* samples;
};

// Upsamples a row of chroma to `width` samples from column `left` of the image, rounded outwards to even
// ones. Each is a mean of the nearest two samples in each direction, weighted 3:1; beyond the image are its
// borders' samples. kWords - 1 bytes more are read.
template <int down>
ALWAYS_INLINE void Upsample(const Plane& plane, int64_t y, int64_t left, int64_t width,
                            const ChromaRow& row) {
  const int64_t first = left / 2, last = (left + width - 1) / 2;
  const int64_t begin = std::max<int64_t>(first - 1, 0), end = std::min(last + 1, plane.columns - 1);
  const int64_t near = y / down, far = down == 1 ? near : y % 2 ? near + 1 : near - 1;
  const uint8_t* const nearest = plane.At(near, begin);
  const uint8_t* const next = plane.At(std::clamp<int64_t>(far, 0, plane.rows - 1), begin);
  int16_t* const needed = row.sums + 1;  // from the first
  int16_t* const to = needed + (begin - first);
  const auto triple = [](Words words) { return WORDS(add_epi16)(words, WORDS(add_epi16)(words, words)); };
  for (int i = 0; i <= end - begin; i += kWords) {
    Words sums = WordsOfBytes(nearest + i);
    if constexpr (down == 2) sums = WORDS(add_epi16)(triple(sums), WordsOfBytes(next + i));
    StoreWords(sums, to + i);
  }
  if (first == 0) needed[-1] = needed[0];
  const int samples = static_cast<int>(last - first + 1);
  if (last == plane.columns - 1) needed[samples] = needed[samples - 1];
  constexpr int shift = down == 2 ? 4 : 2, before = down == 2 ? 8 : 1, after = down == 2 ? 7 : 2;
  for (int i = 0; i < samples; i += kWords) {
    const Words near_three = triple(LoadWords(needed + i));
    const auto mean = [&](int distance, int rounding) {
      const Words sum = WORDS(add_epi16)(near_three, LoadWords(needed + i + distance));
      return WORDS(srli_epi16)(WORDS(add_epi16)(sum, WORDS(set1_epi16)(rounding)), shift);
    };
    // Two samples of 8 bits, the left one in the lower.
    StoreWords(WORDS(add_epi16)(mean(-1, before), WORDS(slli_epi16)(mean(1, after), 8)),
               row.samples + 2 * i);
  }
}

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
      upsample(plane, y, window.left, width, rows[i]);
      chroma[i] = rows[i].samples + window.left % 2;
    }
    ToRgb(luma, chroma[0], chroma[1], width, to);
  }
}

// Sets which samples a window needs of a component that is `factor` times coarser, along one axis of
// `length` pixels: those of whole blocks, with a margin of one sample on each side for upsampling.
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
  if (window.height * window.width * header.components >= kMostSamples ||
      !ReadSampling(header, &sampling) || (header.components == 3 && !IsYCbCr(header)) ||
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
  const size_t row = window.width / 2 + 4 + kWords;
  uint8_t* at = memory->Get(bytes + 4 * row * sizeof(int16_t) + kWords);
  if (!at) return Result::kNoRoom;
  ChromaRow rows[2];
  for (ChromaRow& chroma : rows) {
    chroma = {reinterpret_cast<int16_t*>(at), at + row * sizeof(int16_t)};
    at += 2 * row * sizeof(int16_t);
  }
  for (int i = 0; i < header.components; ++i) {
    planes[i].samples = at;
    at += planes[i].stride * (planes[i].bottom - planes[i].top);
  }
  Decoder decoder(jpeg, planes);
  const Result result = jpeg.ForEachRun(jpeg.Around(window),
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
