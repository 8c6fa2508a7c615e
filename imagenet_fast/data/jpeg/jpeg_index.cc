#include "jpeg_index.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace jpeg_index {
namespace {

constexpr int kVersion = 1;
// Distance of points in a row, if MCUs are not wider. Twice as many points would make cuts hardly
// smaller, half as many would make them larger.
constexpr int kPointPixels = 32;
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

int64_t DivideUp(int64_t number, int64_t by) { return (number + by - 1) / by; }

// --- Bits ------------------------------------------------------------------------------------------

uint64_t Load64(const uint8_t* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

void Store64(uint64_t word, uint8_t* to) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  std::memcpy(to, &word, sizeof word);
}

// Returns whether any byte of a word is 255.
bool HasByte255(uint64_t word) {
  return ((~word - 0x0101010101010101u) & word & 0x8080808080808080u) != 0;
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
    Fill();
    Skip(std::min<int>(start % 8, count_));
  }

  // Makes at least 56 bits available, or all bits up to the marker.
  void Fill() {
    if (end_ - at_ >= 8) {
      const uint64_t word = Load64(at_);
      if (!HasByte255(word)) {
        ahead_ |= word >> count_;
        at_ += (63 - count_) / 8;
        count_ |= 56;
        return;
      }
    }
    FillByBytes();
  }

  // The next bits, the first in the highest bit. After the available ones come further bits or zeros.
  uint64_t ahead() const { return ahead_; }
  int available() const { return count_; }

  // Skips at most the available bits, and at most 63.
  void Skip(int bits) {
    ahead_ <<= bits;
    count_ -= bits;
  }

  Position position() const {
    const int bytes = (count_ + 7) / 8;
    const uint8_t* at = at_;
    for (int i = 0; i < bytes; ++i) at -= IsStuffed(at) ? 2 : 1;
    return static_cast<Position>(at - file_) * 8 + (bytes * 8 - count_);
  }

  // Returns the next marker if less than a byte remains before it; otherwise 0.
  int MarkerAhead() {
    Fill();
    if (count_ >= 8 || end_ - at_ < 2 || at_[0] != 0xFF) return 0;
    return at_[1];
  }

  // Moves to the first bit after that marker.
  void SkipMarker() {
    at_ += 2;
    ahead_ = 0;
    count_ = 0;
  }

 private:
  void FillByBytes() {
    ahead_ = count_ ? ahead_ & ~uint64_t{0} << (64 - count_) : 0;
    while (count_ < 56 && at_ < end_) {
      const uint64_t byte = *at_;
      if (byte == 0xFF) {
        if (end_ - at_ < 2 || at_[1] != 0) return;
        ++at_;
      }
      ++at_;
      ahead_ |= byte << (56 - count_);
      count_ += 8;
    }
  }

  // Returns whether the previous byte, which has been read, was stuffed.
  bool IsStuffed(const uint8_t* at) const {
    return at - file_ >= 2 && at[-1] == 0 && at[-2] == 0xFF;
  }

  const uint8_t* file_;
  const uint8_t* at_;
  const uint8_t* end_;
  uint64_t ahead_ = 0;
  int count_ = 0;
};

// Writes the bits of a scan, with a zero byte after each byte of 255.
class BitWriter {
 public:
  BitWriter(uint8_t* out, uint8_t* end) : at_(out), end_(end) {}

  // Writes the lowest `count` bits, at most 32, of a value whose other bits are 0.
  void Put(uint32_t value, int count) {
    waiting_ = waiting_ << count | value;
    count_ += count;
    if (count_ < 32) return;
    count_ -= 32;
    PutBytes(static_cast<uint32_t>(waiting_ >> count_), 4);
  }

  void Put64(uint64_t word) {
    const uint64_t joined = count_ ? waiting_ << (64 - count_) | word >> count_ : word;
    if (HasByte255(joined) || end_ - at_ < 8) {
      Put(word >> 32, 32);
      Put(word & 0xFFFFFFFF, 32);
      return;
    }
    Store64(joined, at_);
    at_ += 8;
    waiting_ = word;
  }

  // Fills the last byte with ones and returns the end of the output; null if the buffer was too small.
  uint8_t* Finish() {
    const int missing = (8 - count_ % 8) % 8;
    Put((1u << missing) - 1, missing);
    PutBytes(static_cast<uint32_t>(waiting_ << (32 - count_)), count_ / 8);
    return full_ ? nullptr : at_;
  }

 private:
  // Writes the highest bytes of a word.
  void PutBytes(uint32_t word, int bytes) {
    if (end_ - at_ < 2 * bytes) {
      full_ = true;
      return;
    }
    for (int i = 0; i < bytes; ++i) {
      *at_++ = word >> 24;
      if (word >> 24 == 0xFF) *at_++ = 0;
      word <<= 8;
    }
  }

  uint8_t* at_;
  uint8_t* end_;
  uint64_t waiting_ = 0;  // pending bits are the lowest; others have no meaning
  int count_ = 0;         // less than 32
  bool full_ = false;
};

// Moves to the next byte of a scan. Returns whether it is at most `last`, without a marker in between.
bool Step(const uint8_t** at, const uint8_t* last) {
  if (*(*at)++ != 0xFF) return true;
  return *at != last && *(*at)++ == 0;
}

// Copies the bits between two positions in the file. Returns whether both are in bytes of the same scan,
// without a marker in between.
bool CopyBits(Bytes file, Position start, Position end, BitWriter* out) {
  if (start > end || end > file.size * 8) return false;
  const uint8_t* at = file.data + start / 8;
  const uint8_t* const last = file.data + end / 8;
  const int begun = start % 8, more = end % 8;
  if (begun) {
    if (at == last) {
      out->Put((*at & 0xFF >> begun) >> (8 - more), more - begun);
      return true;
    }
    out->Put(*at & 0xFF >> begun, 8 - begun);
    if (!Step(&at, last)) return false;
  }
  while (at < last) {
    if (last - at >= 8) {
      const uint64_t word = Load64(at);
      if (!HasByte255(word)) {
        out->Put64(word);
        at += 8;
        continue;
      }
    }
    out->Put(*at, 8);
    if (!Step(&at, last)) return false;
  }
  if (at != last) return false;
  if (more) out->Put(*at >> (8 - more), more);
  return true;
}

// --- Huffman codes ---------------------------------------------------------------------------------

// A Huffman code with the value that follows it. Its length is 0 if there is none.
struct Code {
  uint8_t length;   // in bits
  uint8_t bits;     // including the value, at most 31
  uint8_t symbol;   // of a DC coefficient: number of bits of the value
  uint8_t advance;  // of an AC coefficient: number of coefficients to advance
};

// The advance of an end-of-block code, more than all runs of a block can add up to.
constexpr int kEndOfBlock = 128;

class CodeTable {
 public:
  // As in DHT: the numbers of codes of lengths 1 to 16, and the symbols.
  const uint8_t* counts = nullptr;
  const uint8_t* symbols = nullptr;
  int size = 0;

  Result Build(bool dc) {
    dc_ = dc;
    if (dc && size > kMostDcCodes) return Result::kUnsupported;
    std::memset(short_codes_, 0, sizeof short_codes_);
    int number = 0;
    uint32_t code = 0;
    for (int length = 1; length <= kLongest; ++length, code <<= 1) {
      first_[length] = code;
      offsets_[length] = number;
      for (int i = 0; i < counts[length - 1]; ++i, ++number, ++code) {
        if (code >> length) return Result::kCorrupt;
        if (dc && symbols[number] > kMostCategory) return Result::kUnsupported;
        if (length > kShort) continue;
        Code* const codes = short_codes_ + (code << (kShort - length));
        std::fill(codes, codes + (1 << (kShort - length)), MakeCode(length, symbols[number]));
      }
    }
    return Result::kOk;
  }

  // Returns the code in the highest bits.
  Code Find(uint64_t bits) const {
    const Code code = short_codes_[bits >> (64 - kShort)];
    return code.length ? code : FindLong(bits);
  }

 private:
  static constexpr int kLongest = 16;
  static constexpr int kShort = 9;  // found by one lookup

  Code MakeCode(int length, int symbol) const {
    const uint8_t code_length = length;
    if (dc_) return {code_length, uint8_t(length + symbol), uint8_t(symbol), 0};
    const int bits = symbol & 15, run = symbol >> 4;
    // As in decoders, a run of 15 without a value means 16 zeros, any other the end of the block.
    const int advance = bits || run == 15 ? run + 1 : kEndOfBlock;
    return {code_length, uint8_t(length + bits), 0, uint8_t(advance)};
  }

  Code FindLong(uint64_t bits) const {
    for (int length = kShort + 1; length <= kLongest; ++length) {
      const uint32_t code = bits >> (64 - length);
      if (code < first_[length]) break;
      const uint32_t number = code - first_[length];
      if (number < counts[length - 1]) return MakeCode(length, symbols[offsets_[length] + number]);
    }
    return {};
  }

  bool dc_ = false;
  uint32_t first_[kLongest + 1];  // first code of each length
  int offsets_[kLongest + 1];     // index of its symbol
  Code short_codes_[1 << kShort];
};

// Reads the difference of a DC coefficient; returns whether it is valid.
bool ReadDc(const CodeTable& table, BitReader* bits, int* difference) {
  if (bits->available() < 32) bits->Fill();
  const Code code = table.Find(bits->ahead());
  if (!code.length || code.bits > bits->available()) return false;
  int value = 0;
  if (const int size = code.symbol) {
    value = (bits->ahead() << code.length) >> (64 - size);
    if (value < 1 << (size - 1)) value -= (1 << size) - 1;
  }
  *difference = value;
  bits->Skip(code.bits);
  return true;
}

// Skips the AC coefficients of a block; returns whether they are valid.
bool SkipAc(const CodeTable& table, BitReader* bits) {
  int place = 1;
  do {
    if (bits->available() < 32) bits->Fill();
    const Code code = table.Find(bits->ahead());
    if (!code.length || code.bits > bits->available()) return false;
    bits->Skip(code.bits);
    place += code.advance;
  } while (place < kCoefficients);
  return place == kCoefficients || place > kEndOfBlock;
}

// The codes of DC coefficients, including codes for differences that the JPEG's table lacks.
//
// The first block of a row in the cut may differ from the previous one by more than any neighbours in the
// image, for which a table that was optimized for the image has no code.
class DcEncoder {
 public:
  explicit DcEncoder(const CodeTable& table) {
    std::memcpy(counts_, table.counts, sizeof counts_);
    std::memcpy(symbols_, table.symbols, table.size);
    size_ = table.size;
    uint32_t code = 0, next = 0;
    int number = 0, longest = 1;
    for (int length = 1; length <= 16; ++length, code <<= 1) {
      for (int i = 0; i < counts_[length - 1]; ++i, ++number) {
        codes_[symbols_[number]] = code++;
        lengths_[symbols_[number]] = longest = length;
        next = code;
      }
    }
    // Existing codes must not change, so new ones follow the last. No code may consist of ones only.
    for (int category = 0; category <= kMostCategory; ++category) {
      if (lengths_[category]) continue;
      if (next >> longest) return;
      while (next == (1u << longest) - 1) {
        if (longest == 16) return;
        next <<= 1;
        ++longest;
      }
      codes_[category] = next++;
      lengths_[category] = longest;
      symbols_[size_++] = category;
      ++counts_[longest - 1];
      extended_ = true;
    }
  }

  // Writes a difference; returns whether it has a code.
  bool Put(int difference, BitWriter* out) const {
    const uint32_t magnitude = std::abs(difference);
    const int category = magnitude ? 32 - __builtin_clz(magnitude) : 0;
    if (category > kMostCategory || !lengths_[category]) return false;
    const uint32_t value = (difference < 0 ? difference - 1 : difference) & ((1 << category) - 1);
    out->Put(static_cast<uint32_t>(codes_[category]) << category | value,
             lengths_[category] + category);
    return true;
  }

  bool extended() const { return extended_; }
  const uint8_t* counts() const { return counts_; }
  const uint8_t* symbols() const { return symbols_; }
  int size() const { return size_; }

 private:
  uint8_t counts_[16];
  uint8_t symbols_[kMostDcCodes + kMostCategory + 1];
  int size_;
  uint16_t codes_[kMostCategory + 1] = {};
  uint8_t lengths_[kMostCategory + 1] = {};
  bool extended_ = false;
};

// --- The header ------------------------------------------------------------------------------------

struct Component {
  int id = 0;
  int horizontal = 1, vertical = 1;  // blocks in an MCU
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
      table.size = symbols;
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
    if (!table->size) return Result::kUnsupported;  // a default table of decoders
    if (*built) return Result::kOk;
    *built = true;
    return table->Build(is_dc);
  }
};

// --- The index -------------------------------------------------------------------------------------

constexpr uint32_t kHashBegin = 2166136261u;
constexpr size_t kFixedBytes = 10, kHashBytes = 4;
constexpr size_t kPieces = 64, kPieceBytes = 8;

uint32_t Hash(Bytes bytes, uint32_t hash = kHashBegin) {
  for (size_t i = 0; i < bytes.size; ++i) hash = (hash ^ bytes.data[i]) * 16777619u;
  return hash;
}

uint32_t HashJpeg(Bytes jpeg, const Header& header) {
  uint32_t hash = kHashBegin;
  for (const Segment& segment : header.segments) hash = Hash(segment.all, hash);
  const size_t bytes = std::min(jpeg.size, kPieceBytes);
  for (size_t i = 0; i < kPieces; ++i) {
    hash = Hash({jpeg.data + (jpeg.size - bytes) * i / (kPieces - 1), bytes}, hash);
  }
  return hash;
}

uint32_t Load32(const uint8_t* from) {
  return from[0] | from[1] << 8 | from[2] << 16 | static_cast<uint32_t>(from[3]) << 24;
}

// The points, by the number of the MCU after each.
class Points {
 public:
  Points(const Header& header, int spacing)
      : columns_(header.columns),
        all_(header.columns * header.rows),
        interval_(header.restart_interval),
        spacing_(spacing) {}

  int64_t Next(int64_t mcu) const {
    const int64_t row = mcu / columns_ * columns_;
    int64_t next = std::min((mcu - row) / spacing_ * spacing_ + spacing_, columns_) + row;
    if (interval_) next = std::min(next, mcu / interval_ * interval_ + interval_);
    return next;
  }

  // Returns whether there is a restart marker before an MCU.
  bool IsRestart(int64_t mcu) const {
    return interval_ && mcu % interval_ == 0 && mcu < all_;
  }

 private:
  int64_t columns_, all_, interval_, spacing_;
};

class IndexWriter {
 public:
  explicit IndexWriter(std::vector<uint8_t>* out) : out_(out) {}

  void PutByte(int value) { out_->push_back(value); }
  void Put32(uint32_t value) {
    for (int i = 0; i < 4; ++i) PutByte(value >> 8 * i & 0xFF);
  }
  void PutVarint(uint64_t value) {
    for (; value > 127; value >>= 7) PutByte((value & 127) | 128);
    PutByte(value);
  }
  void PutSigned(int64_t value) { PutVarint(value < 0 ? -2 * value - 1 : 2 * value); }

 private:
  std::vector<uint8_t>* out_;
};

// Reads the points of an index.
class IndexReader {
 public:
  explicit IndexReader(Bytes points) : at_(points.data), end_(points.data + points.size) {}

  // Returns a number below 2**35; if there is none, returns 0 and sets failed().
  int64_t Varint() {
    int64_t value = 0;
    for (int shift = 0; shift < 35 && at_ < end_; shift += 7) {
      const int64_t byte = *at_++;
      value |= (byte & 127) << shift;
      if (byte < 128) return value;
    }
    failed_ = true;
    return 0;
  }

  int64_t Signed() {
    const int64_t value = Varint();
    return value & 1 ? -(value + 1) / 2 : value / 2;
  }

  bool failed() const { return failed_; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  bool failed_ = false;
};

// --- The cut ---------------------------------------------------------------------------------------

// A rectangle of MCUs; `last` numbers are exclusive.
struct Region {
  int64_t first_row, last_row, first_column, last_column;
};

// Returns the MCUs that determine a window's pixels.
Region RegionAround(const Header& header, const Window& window, int scale, int spacing) {
  // Chroma upsampling uses the neighbours on each side. At reduced size, the window's edges may also be
  // rounded outwards.
  const int64_t margin = scale == 1 ? 1 : 2 * scale;
  const auto up = [spacing](int64_t column) { return DivideUp(column, spacing) * spacing; };
  Region region = {
      std::max<int64_t>(window.top - margin, 0) / header.mcu_height,
      std::min(DivideUp(window.top + window.height + margin, header.mcu_height), header.rows),
      std::max<int64_t>(window.left - margin, 0) / header.mcu_width / spacing * spacing,
      std::min(up(DivideUp(window.left + window.width + margin, header.mcu_width)), header.columns),
  };
  // Decoders upsample components of at most two samples in width differently.
  const auto is_narrow = [&] {
    const int64_t right = std::min(region.last_column * header.mcu_width, header.width);
    const int64_t width = right - region.first_column * header.mcu_width;
    for (int i = 0; i < header.components; ++i) {
      if (width * header.component[i].horizontal <= 2 * header.horizontal * scale) return true;
    }
    return false;
  };
  while (is_narrow() && (region.first_column > 0 || region.last_column < header.columns)) {
    region.first_column = std::max<int64_t>(region.first_column - spacing, 0);
    region.last_column = std::min(region.last_column + spacing, header.columns);
  }
  return region;
}

// The bits between two points of the index, which are contiguous in the image and in the cut.
struct Run {
  Position start, end;
  int dc_before[kMostComponents], dc_after[kMostComponents];
};

class ScanCutter {
 public:
  ScanCutter(Bytes jpeg, const Header& header, const DcEncoder* encoders, BitWriter* out)
      : jpeg_(jpeg), header_(header), encoders_(encoders), out_(out) {}

  // Appends a run to the output.
  Result Copy(const Run& run) {
    // Only the first DC coefficient of each component changes.
    BitReader bits(jpeg_, run.start);
    Position copied = run.start;
    int missing = header_.components;
    bool seen[kMostComponents] = {};
    for (int block = 0; block < header_.blocks && missing; ++block) {
      const int number = header_.block_component[block];
      const Position before = bits.position();
      int difference;
      if (!ReadDc(header_.dc_table(number), &bits, &difference)) return Result::kBadIndex;
      if (!seen[number]) {
        seen[number] = true;
        --missing;
        if (!CopyBits(jpeg_, copied, before, out_)) return Result::kBadIndex;
        const DcEncoder& encoder = encoders_[header_.component[number].dc_table];
        if (!encoder.Put(run.dc_before[number] + difference - dc_[number], out_)) {
          return Result::kUnsupported;
        }
        copied = bits.position();
      }
      if (missing && !SkipAc(header_.ac_table(number), &bits)) return Result::kBadIndex;
    }
    std::memcpy(dc_, run.dc_after, sizeof dc_);
    return CopyBits(jpeg_, copied, run.end, out_) ? Result::kOk : Result::kBadIndex;
  }

 private:
  Bytes jpeg_;
  const Header& header_;
  const DcEncoder* encoders_;
  BitWriter* out_;
  int dc_[kMostComponents] = {};  // of the last block of each component
};

// Reads the points up to the end of a region and copies the runs in the region.
Result CutScan(Bytes jpeg, const Header& header, Bytes points_bytes, const Region& region, int spacing,
               ScanCutter* cutter) {
  const Points points(header, spacing);
  IndexReader index(points_bytes);
  Position position = header.scan * 8;
  Run run = {};
  bool open = false;
  int dc[kMostComponents] = {};
  int64_t row = 0, column = 0;
  const int64_t end = (region.last_row - 1) * header.columns + region.last_column;
  for (int64_t mcu = 0; mcu < end;) {
    const bool inside = row >= region.first_row && column >= region.first_column &&
                        column < region.last_column;
    if (open && !inside) {
      if (const Result result = cutter->Copy(run); result != Result::kOk) return result;
      open = false;
    }
    if (inside && !open) {
      run.start = position;
      std::memcpy(run.dc_before, dc, sizeof dc);
      open = true;
    }
    mcu = points.Next(mcu);
    column = mcu - row * header.columns;
    if (column == header.columns) {
      ++row;
      column = 0;
    }
    position += index.Varint();
    for (int i = 0; i < header.components; ++i) {
      const int64_t sum = dc[i] + index.Signed();
      if (sum < -kMostDc || sum > kMostDc) return Result::kBadIndex;
      dc[i] = sum;
    }
    if (index.failed() || position > jpeg.size * 8) return Result::kBadIndex;
    run.end = position;
    std::memcpy(run.dc_after, dc, sizeof dc);
    if (!points.IsRestart(mcu)) continue;
    if (open) {
      if (const Result result = cutter->Copy(run); result != Result::kOk) return result;
      open = false;
    }
    BitReader bits(jpeg, position);
    const int marker = bits.MarkerAhead();
    if (marker < kRst0 || marker > kRst7) return Result::kBadIndex;
    bits.SkipMarker();
    position = bits.position();
    std::fill(dc, dc + kMostComponents, 0);
  }
  return open ? cutter->Copy(run) : Result::kOk;
}

// Writes the segments and returns their end; null if the buffer is too small.
uint8_t* WriteHeader(const Header& header, const DcEncoder* encoders, const bool* used, int64_t height,
                     int64_t width, uint8_t* out, uint8_t* end) {
  const auto put = [&out, end](Bytes bytes) {
    if (static_cast<size_t>(end - out) < bytes.size) return false;
    std::memcpy(out, bytes.data, bytes.size);
    out += bytes.size;
    return true;
  };
  const uint8_t begin[] = {0xFF, kSoi};
  if (!put({begin, sizeof begin})) return nullptr;
  for (const Segment& segment : header.segments) {
    if (!put(segment.all)) return nullptr;
    if (segment.marker != kSof0 && segment.marker != kSof1) continue;
    // After the marker, the length and the precision.
    uint8_t* const size = out - segment.all.size + 5;
    size[0] = height >> 8;
    size[1] = height & 0xFF;
    size[2] = width >> 8;
    size[3] = width & 0xFF;
  }
  for (int i = 0; i < kTables; ++i) {
    if (!used[i] || !encoders[i].extended()) continue;
    // It replaces the table of the same number.
    const size_t length = 2 + 1 + 16 + encoders[i].size();
    const uint8_t start[] = {0xFF, kDht, uint8_t(length >> 8), uint8_t(length), uint8_t(i)};
    if (!put({start, sizeof start}) || !put({encoders[i].counts(), 16}) ||
        !put({encoders[i].symbols(), static_cast<size_t>(encoders[i].size())})) {
      return nullptr;
    }
  }
  return put(header.scan_segment.all) ? out : nullptr;
}

}  // namespace

Result MakeIndex(Bytes jpeg, std::vector<uint8_t>* index) {
  Header header;
  Result result = header.Parse(jpeg);
  if (result != Result::kOk) return result;
  const int spacing = std::max<int>(kPointPixels / header.mcu_width, 1);
  index->clear();
  IndexWriter out(index);
  out.PutByte(kVersion);
  out.PutByte(spacing);
  out.Put32(jpeg.size);
  out.Put32(HashJpeg(jpeg, header));

  const Points points(header, spacing);
  const int64_t all = header.rows * header.columns;
  BitReader bits(jpeg, header.scan * 8);
  Position last = header.scan * 8;
  int dc[kMostComponents] = {}, last_dc[kMostComponents] = {};
  int restarts = 0;
  for (int64_t mcu = 0; mcu < all;) {
    const int64_t point = points.Next(mcu);
    for (; mcu < point; ++mcu) {
      for (int block = 0; block < header.blocks; ++block) {
        const int number = header.block_component[block];
        int difference;
        if (!ReadDc(header.dc_table(number), &bits, &difference) ||
            !SkipAc(header.ac_table(number), &bits)) {
          return Result::kCorrupt;
        }
        dc[number] += difference;
        if (dc[number] < -kMostDc || dc[number] > kMostDc) return Result::kCorrupt;
      }
    }
    const Position position = bits.position();
    out.PutVarint(position - last);
    last = position;
    for (int i = 0; i < header.components; ++i) {
      out.PutSigned(dc[i] - last_dc[i]);
      last_dc[i] = dc[i];
    }
    if (!points.IsRestart(mcu)) continue;
    if (bits.MarkerAhead() != kRst0 + restarts++ % 8) return Result::kCorrupt;
    bits.SkipMarker();
    last = bits.position();
    std::fill(dc, dc + kMostComponents, 0);
    std::fill(last_dc, last_dc + kMostComponents, 0);
  }
  const int marker = bits.MarkerAhead();
  if (!marker) return Result::kCorrupt;
  if (marker != kEoi) return Result::kUnsupported;  // another scan
  out.Put32(Hash({index->data(), index->size()}));
  return Result::kOk;
}

size_t MostCutBytes(size_t size) { return size + size / 8 + 1024; }

Result CutWindow(Bytes jpeg, Bytes index, const Window& window, int scale, uint8_t* out, size_t most,
                 Cut* cut) {
  if (index.size < kFixedBytes + kHashBytes || index.data[0] != kVersion) return Result::kBadIndex;
  const Bytes hashed = {index.data, index.size - kHashBytes};
  const int spacing = index.data[1];
  if (!spacing || Load32(index.data + 2) != jpeg.size || Load32(index.data + hashed.size) != Hash(hashed)) {
    return Result::kBadIndex;
  }
  Header header;
  Result result = header.Parse(jpeg);
  if (result != Result::kOk) return result;
  if (Load32(index.data + 6) != HashJpeg(jpeg, header)) return Result::kBadIndex;
  if (window.top < 0 || window.left < 0 || window.height < 1 || window.width < 1 ||
      window.top > header.height - window.height || window.left > header.width - window.width ||
      (scale != 1 && scale != 2 && scale != 4 && scale != 8)) {
    return Result::kBadWindow;
  }

  const Region region = RegionAround(header, window, scale, spacing);
  cut->top = region.first_row * header.mcu_height;
  cut->left = region.first_column * header.mcu_width;
  const int64_t height = std::min(region.last_row * header.mcu_height, header.height) - cut->top;
  const int64_t width = std::min(region.last_column * header.mcu_width, header.width) - cut->left;

  std::vector<DcEncoder> encoders;
  bool used[kTables] = {};
  for (int i = 0; i < header.components; ++i) used[header.component[i].dc_table] = true;
  const CodeTable& any = header.dc_table(0);
  for (int i = 0; i < kTables; ++i) encoders.emplace_back(used[i] ? header.dc[i] : any);

  const uint8_t last[] = {0xFF, kEoi};
  if (most < sizeof last) return Result::kNoRoom;
  uint8_t* const end = out + most - sizeof last;
  uint8_t* at = WriteHeader(header, encoders.data(), used, height, width, out, end);
  if (!at) return Result::kNoRoom;
  BitWriter bits(at, end);
  ScanCutter cutter(jpeg, header, encoders.data(), &bits);
  const Bytes points = {index.data + kFixedBytes, hashed.size - kFixedBytes};
  result = CutScan(jpeg, header, points, region, spacing, &cutter);
  if (result != Result::kOk) return result;
  at = bits.Finish();
  if (!at) return Result::kNoRoom;
  std::memcpy(at, last, sizeof last);
  cut->size = at + sizeof last - out;
  return Result::kOk;
}

}  // namespace jpeg_index
