// What indexing, cutting and decoding read of a JPEG: its header, its Huffman codes and the bits of its scan.

#ifndef IMAGENET_FAST_JPEG_SCAN_H_
#define IMAGENET_FAST_JPEG_SCAN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "always_inline.h"

namespace jpeg {

struct Bytes {
  const uint8_t* data;
  size_t size;
};

enum class Result {
  kOk,
  kUnsupported,  // the JPEG cannot be indexed, or its pixels not be made here
  kCorrupt,      // the JPEG is damaged or truncated
  kBadIndex,     // the index is damaged or of another JPEG
  kBadWindow,    // the window is empty or not in the image
  kNoRoom,       // the output buffer is too small, or there is not enough memory
};

constexpr int kMostComponents = 3;
constexpr int kMostBlocks = 10;  // in an MCU, by the standard
constexpr int kTables = 4;
constexpr int kCoefficients = 64;
constexpr int kMostCategory = 11;  // of differences of DC coefficients, for 8-bit samples
constexpr int kMostDcCodes = 16;
constexpr int kMostDc = 32767;
constexpr size_t kMostSegments = 256;
constexpr size_t kMostBytes = size_t{1} << 30;

// Markers, which follow a byte of 255.
enum : uint8_t {
  kSof0 = 0xC0,
  kSof1 = 0xC1,
  kDht = 0xC4,
  kRst0 = 0xD0,
  kRst7 = 0xD7,
  kSoi = 0xD8,
  kEoi = 0xD9,
  kSos = 0xDA,
  kDqt = 0xDB,
  kDri = 0xDD,
  kApp0 = 0xE0,
  kApp14 = 0xEE,
  kApp15 = 0xEF,
  kCom = 0xFE,
};

inline int64_t DivideUp(int64_t number, int64_t by) { return (number + by - 1) / by; }

// --- Bits ------------------------------------------------------------------------------------------

inline uint64_t Load64(const uint8_t* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

// A position is a number of bits from the start of the file, including stuffed bytes. Between two bytes of
// the scan, it is the position of the second.
using Position = uint64_t;

// Reads the bits of a scan up to the next marker, followed by zeros.
class BitReader {
 public:
  // Starts at a position, which must be in the file.
  BitReader(Bytes file, Position start)
      : file_(file.data), at_(file.data + start / 8), end_(file.data + file.size) {
    FindByte255();
    Fill();
    Skip(start % 8);
  }

  // Makes at least 56 bits available.
  void Fill() {
    if (__builtin_expect(byte255_ - at_ >= 8, 1)) {
      ahead_ |= Load64(at_) >> count_;
      at_ += (63u - count_) / 8;
      count_ |= 56;
      return;
    }
    // A copy, so that compilers can keep this reader in registers.
    BitReader copy = *this;
    copy.FillByBytes();
    *this = copy;
  }

  // Makes at least 32 bits available.
  void Need32() {
    if (__builtin_expect(count_ < 32, 0)) Fill();
  }

  // The next bits, the first in the highest bit. After the available ones come further bits or zeros.
  uint64_t ahead() const { return ahead_; }

  // Skips at most the available bits, and at most 63.
  void Skip(int bits) {
    ahead_ <<= bits;
    count_ -= bits;
  }

  // Returns whether bits behind the scan's were skipped.
  bool overrun() const { return count_ < zeros_; }

  // Without an overrun.
  Position position() const {
    const int left = count_ - zeros_, bytes = (left + 7) / 8;
    const uint8_t* at = at_;
    for (int i = 0; i < bytes; ++i) at -= IsStuffed(at) ? 2 : 1;
    return static_cast<Position>(at - file_) * 8 + (bytes * 8 - left);
  }

  // Returns the next marker if less than a byte remains before it; otherwise 0.
  int MarkerAhead() {
    Fill();
    if (count_ - zeros_ >= 8 || end_ - at_ < 2 || at_[0] != 0xFF) return 0;
    return at_[1];
  }

  // Moves to the first bit after that marker.
  void SkipMarker() {
    at_ += 2;
    FindByte255();
    ahead_ = 0;
    count_ = zeros_ = 0;
  }

 private:
  __attribute__((noinline)) void FillByBytes() {
    if (byte255_ != end_ && *byte255_ != 0xFF) FindByte255();
    if (byte255_ - at_ >= 8) return Fill();
    ahead_ = count_ ? ahead_ & ~uint64_t{0} << (64 - count_) : 0;
    while (count_ < 56) {
      const bool stuffed = end_ - at_ >= 2 && at_[0] == 0xFF && at_[1] == 0;
      if (at_ == end_ || (*at_ == 0xFF && !stuffed)) {
        zeros_ += 56 - count_;
        count_ = 56;
        return;
      }
      ahead_ |= uint64_t{*at_} << (56 - count_);
      count_ += 8;
      at_ += 1 + stuffed;
      if (stuffed) FindByte255();
    }
  }

  // Searches so far that it pays for short runs of the scan, too.
  void FindByte255() {
    const size_t size = std::min<size_t>(end_ - at_, 1024);
    const void* const found = size ? std::memchr(at_, 0xFF, size) : nullptr;
    byte255_ = found ? static_cast<const uint8_t*>(found) : at_ + size;
  }

  // Returns whether the previous byte, which has been read, was stuffed.
  bool IsStuffed(const uint8_t* at) const {
    return at - file_ >= 2 && at[-1] == 0 && at[-2] == 0xFF;
  }

  const uint8_t* file_;
  const uint8_t* at_;
  const uint8_t* byte255_;  // the next one is here or later
  const uint8_t* end_;
  uint64_t ahead_ = 0;
  int count_ = 0;
  int64_t zeros_ = 0;  // added behind the scan
};

// --- Huffman codes ---------------------------------------------------------------------------------

// A Huffman code, and how the value that follows it is read.
class Code {
 public:
  Code() = default;
  // `length` of the code and `size` of the value in bits; `negative`: whether the value begins with 0, and is
  // therefore negative; `advance`, of an AC coefficient: number of coefficients to advance.
  Code(int length, int size, bool negative, unsigned advance)
      : bits_(length + size),
        size_(size),
        advance_(advance),
        shift_(-(length + size) & 63),
        offset_(size && negative ? 1 - (1 << size) : 0) {}

  // Of the code and the value; 0: there is no such code.
  int bits() const { return bits_; }
  int advance() const { return advance_; }

  // The value, if the code is in the highest bits.
  int Value(uint64_t ahead) const {
    return static_cast<int>(static_cast<uint32_t>(ahead >> (shift_ & 63)) & ((1u << size_) - 1)) + offset_;
  }

 private:
  uint8_t bits_ = 0, size_ = 0, advance_ = 0, shift_ = 0;
  int32_t offset_ = 0;
};

// More than the coefficients of a block: the advances of what is no code, and of an end of block, which is
// more than all runs of a block can add up to.
constexpr unsigned kNoCode = 64, kEndOfBlock = 128;

class CodeTable {
 public:
  // As in DHT: the numbers of codes of lengths 1 to 16, and the symbols.
  const uint8_t* counts = nullptr;
  const uint8_t* symbols = nullptr;
  int symbol_count = 0;

  Result Build(bool dc) {
    dc_ = dc;
    if (dc && symbol_count > kMostDcCodes) return Result::kUnsupported;
    std::fill_n(short_codes_, 1 << kShort, Code(0, 0, false, kNoCode));
    std::fill_n(short_bits_, 1 << kShort, 0);
    int number = 0;
    uint32_t code = 0;
    for (int length = 1; length <= kLongest; ++length, code <<= 1) {
      first_[length] = code;
      offsets_[length] = number;
      for (int i = 0; i < counts[length - 1]; ++i, ++number, ++code) {
        // No code may consist of ones only.
        if ((code + 1) >> length) return Result::kCorrupt;
        if (dc && symbols[number] > kMostCategory) return Result::kUnsupported;
        if (length >= kShort) continue;
        const int half = 1 << (kShort - length - 1);
        Code* const codes = short_codes_ + (code << (kShort - length));
        std::fill(codes, codes + half, MakeCode(length, symbols[number], true));
        std::fill(codes + half, codes + 2 * half, MakeCode(length, symbols[number], false));
        std::fill_n(short_bits_ + (codes - short_codes_), 2 * half, codes->bits());
      }
    }
    return Result::kOk;
  }

  // Returns the code in the highest bits, if it is short; otherwise none.
  const Code& FindShort(uint64_t bits) const { return short_codes_[bits >> (64 - kShort)]; }

  // Returns only its bits(), for which the next code waits.
  int FindShortBits(uint64_t bits) const { return short_bits_[bits >> (64 - kShort)]; }

  // Returns it whatever its length.
  Code Find(uint64_t bits) const {
    const Code code = FindShort(bits);
    return __builtin_expect(code.bits(), 1) ? code : FindLong(bits);
  }

 private:
  static constexpr int kLongest = 16;
  static constexpr int kShort = 10;  // bits of a short code with the first of its value

  Code MakeCode(int length, int symbol, bool negative) const {
    const int size = dc_ ? symbol : symbol & 15, run = dc_ ? 0 : symbol >> 4;
    // As in decoders, a run of 15 without a value means 16 zeros, any other the end of the block.
    return {length, size, negative, size || run == 15 ? run + 1u : kEndOfBlock};
  }

  __attribute__((noinline)) Code FindLong(uint64_t bits) const {
    for (int length = kShort; length <= kLongest; ++length) {
      const uint32_t code = bits >> (64 - length);
      if (code < first_[length]) break;
      const uint32_t number = code - first_[length];
      if (number < counts[length - 1]) {
        return MakeCode(length, symbols[offsets_[length] + number], !(bits << length >> 63));
      }
    }
    return {0, 0, false, kNoCode};
  }

  bool dc_ = false;
  uint32_t first_[kLongest + 1];  // first code of each length
  int offsets_[kLongest + 1];     // index of its symbol
  Code short_codes_[1 << kShort];
  uint8_t short_bits_[1 << kShort];  // small, and addressed without computing
};

// Reads the difference of a DC coefficient; returns whether it is valid.
ALWAYS_INLINE bool ReadDc(const CodeTable& table, BitReader* bits, int* difference) {
  bits->Need32();
  const Code code = table.Find(bits->ahead());
  *difference = code.Value(bits->ahead());
  bits->Skip(code.bits());
  return code.bits() && !bits->overrun();
}

// Reads the AC coefficients of a block, and calls `take` with the place and the value of each that is
// stored, and with values of 0 after 16 zeros. Returns whether they are valid.
template <typename Take>
ALWAYS_INLINE bool ReadAc(const CodeTable& table, BitReader* bits, Take take) {
  BitReader reader = *bits;
  constexpr unsigned last = kCoefficients - 1;
  unsigned place = 0;
  int value = 0, size = 0;
  // `length` is that of the code with its value.
  const auto read = [&](const Code& code, int length) __attribute__((always_inline)) {
    value = code.Value(reader.ahead());
    size = length;
    reader.Skip(size);
    place += code.advance();
    if (place >= last) return false;
    take(place, value);
    return true;
  };
  const auto read_short = [&]() __attribute__((always_inline)) {
    return read(table.FindShort(reader.ahead()), table.FindShortBits(reader.ahead()));
  };
  // To fill each second time is faster than to fill when that is needed, which cannot be predicted.
  for (;;) {
    reader.Fill();
    if (read_short()) {
      reader.Need32();
      if (read_short()) continue;
    }
    if (size) break;
    place -= kNoCode;
    reader.Need32();
    const Code code = table.Find(reader.ahead());
    if (!read(code, code.bits())) break;
  }
  *bits = reader;
  if (place == last) take(place, value);
  return (place == last || place >= kEndOfBlock) && !reader.overrun();
}

ALWAYS_INLINE bool SkipAc(const CodeTable& table, BitReader* bits) {
  return ReadAc(table, bits, [](int, int) {});
}

// --- The header ------------------------------------------------------------------------------------

struct Component {
  int id = 0;
  int horizontal = 1, vertical = 1;  // blocks in an MCU
  int quantization = 0;           // number of its table
  int dc_table = 0, ac_table = 0;
};

struct Segment {
  uint8_t marker;
  Bytes all;      // including the marker
  Bytes content;  // after the length
};

class Header {
 public:
  int64_t width = 0, height = 0;
  int components = 0;
  Component component[kMostComponents];
  int horizontal = 1, vertical = 1;  // maximum over the components
  int64_t mcu_width = 0, mcu_height = 0;
  int64_t rows = 0, columns = 0;  // of MCUs
  int64_t restart_interval = 0;   // in MCUs; 0: there are no restart markers
  int blocks = 0;
  uint8_t block_component[kMostBlocks];
  CodeTable dc[kTables], ac[kTables];
  std::vector<Segment> segments;  // those that decoding needs, without the scan's
  Segment scan_segment;
  size_t scan = 0;  // offset of its first byte

  Result Parse(Bytes jpeg) {
    if (jpeg.size < 2 || jpeg.data[0] != 0xFF || jpeg.data[1] != kSoi) return Result::kUnsupported;
    if (jpeg.size > kMostBytes) return Result::kUnsupported;
    size_t at = 2;
    for (;;) {
      Segment segment;
      if (!NextSegment(jpeg, &at, &segment)) return Result::kCorrupt;
      if (segments.size() == kMostSegments) return Result::kUnsupported;
      Result result = Result::kOk;
      switch (segment.marker) {
        case kSof0:
        case kSof1:
          segments.push_back(segment);
          result = ParseFrame(segment.content);
          break;
        case kDht:
          segments.push_back(segment);
          result = ParseTables(segment.content);
          break;
        case kDri:
          if (segment.content.size != 2) return Result::kCorrupt;
          restart_interval = segment.content.data[0] << 8 | segment.content.data[1];
          break;
        case kDqt:
        case kApp0:   // JFIF: YCbCr
        case kApp14:  // Adobe: the colour space
          segments.push_back(segment);
          break;
        case kSos:
          scan_segment = segment;
          scan = at;
          return ParseScan(segment.content);
        default:
          if (segment.marker != kCom && (segment.marker < kApp0 || segment.marker > kApp15)) {
            return Result::kUnsupported;
          }
      }
      if (result != Result::kOk) return result;
    }
  }

  const CodeTable& dc_table(int number) const { return dc[component[number].dc_table]; }
  const CodeTable& ac_table(int number) const { return ac[component[number].ac_table]; }

 private:
  static bool NextSegment(Bytes jpeg, size_t* at, Segment* segment) {
    size_t begin = *at;
    if (begin >= jpeg.size || jpeg.data[begin] != 0xFF) return false;
    // A marker may be preceded by any number of bytes of 255.
    while (jpeg.size - begin >= 2 && jpeg.data[begin + 1] == 0xFF) ++begin;
    if (jpeg.size - begin < 4) return false;
    const uint8_t* const data = jpeg.data + begin;
    const size_t length = data[2] << 8 | data[3];
    if (length < 2 || length > jpeg.size - begin - 2) return false;
    *segment = {data[1], {data, length + 2}, {data + 4, length - 2}};
    *at = begin + 2 + length;
    return true;
  }

  Result ParseFrame(Bytes content) {
    if (components || content.size < 6) return Result::kCorrupt;
    const uint8_t* const data = content.data;
    height = data[1] << 8 | data[2];
    width = data[3] << 8 | data[4];
    const int count = data[5];
    // A height of 0 is given by a segment after the scan.
    if (data[0] != 8 || !height || !width || (count != 1 && count != 3)) {
      return Result::kUnsupported;
    }
    if (content.size != 6 + 3u * count) return Result::kCorrupt;
    for (int i = 0; i < count; ++i) {
      const uint8_t* const from = data + 6 + 3 * i;
      Component& to = component[i];
      to.id = from[0];
      to.horizontal = from[1] >> 4;
      to.vertical = from[1] & 15;
      to.quantization = from[2];
      if (to.horizontal < 1 || to.horizontal > 4 || to.vertical < 1 || to.vertical > 4) {
        return Result::kCorrupt;
      }
      // A single component is not interleaved, so its MCU is one block.
      if (count == 1) to.horizontal = to.vertical = 1;
      horizontal = std::max(horizontal, to.horizontal);
      vertical = std::max(vertical, to.vertical);
    }
    for (int i = 0; i < count; ++i) {
      const int number = component[i].horizontal * component[i].vertical;
      if (blocks + number > kMostBlocks) return Result::kCorrupt;
      std::fill(block_component + blocks, block_component + blocks + number, i);
      blocks += number;
    }
    components = count;
    mcu_width = 8 * horizontal;
    mcu_height = 8 * vertical;
    columns = DivideUp(width, mcu_width);
    rows = DivideUp(height, mcu_height);
    return Result::kOk;
  }

  Result ParseTables(Bytes content) {
    while (content.size) {
      if (content.size < 17) return Result::kCorrupt;
      const uint8_t* const data = content.data;
      int symbols = 0;
      for (int i = 1; i <= 16; ++i) symbols += data[i];
      if (symbols < 1 || symbols > 256 || content.size < 17u + symbols) return Result::kCorrupt;
      const int kind = data[0] >> 4, number = data[0] & 15;
      if (kind > 1 || number >= kTables) return Result::kCorrupt;
      CodeTable& table = kind ? ac[number] : dc[number];
      table.counts = data + 1;
      table.symbols = data + 17;
      table.symbol_count = symbols;
      content = {data + 17 + symbols, content.size - 17 - symbols};
    }
    return Result::kOk;
  }

  Result ParseScan(Bytes content) {
    if (!components || content.size != 4 + 2u * components) return Result::kUnsupported;
    const uint8_t* const data = content.data;
    if (data[0] != components) return Result::kUnsupported;
    const uint8_t* const last = data + 1 + 2 * components;
    if (last[0] != 0 || last[1] != kCoefficients - 1 || last[2] != 0) return Result::kUnsupported;
    bool dc_built[kTables] = {}, ac_built[kTables] = {};
    for (int i = 0; i < components; ++i) {
      if (data[1 + 2 * i] != component[i].id) return Result::kUnsupported;
      const int dc_number = data[2 + 2 * i] >> 4, ac_number = data[2 + 2 * i] & 15;
      if (dc_number >= kTables || ac_number >= kTables) return Result::kCorrupt;
      component[i].dc_table = dc_number;
      component[i].ac_table = ac_number;
      Result result = Build(true, &dc[dc_number], &dc_built[dc_number]);
      if (result == Result::kOk) result = Build(false, &ac[ac_number], &ac_built[ac_number]);
      if (result != Result::kOk) return result;
    }
    return Result::kOk;
  }

  static Result Build(bool is_dc, CodeTable* table, bool* built) {
    if (!table->symbol_count) return Result::kUnsupported;  // a default table of decoders
    if (*built) return Result::kOk;
    *built = true;
    return table->Build(is_dc);
  }
};

}  // namespace jpeg

#endif  // IMAGENET_FAST_JPEG_SCAN_H_
