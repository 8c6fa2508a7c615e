#include "jpeg_cut.h"

#include <cstdlib>
#include <cstring>

namespace jpeg {
namespace {

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

// The codes of DC coefficients, including codes for differences that the JPEG's table lacks.
//
// The first block of a row in the cut may differ from the previous one by more than any neighbours in the
// image, for which a table that was optimized for the image has no code.
class DcEncoder {
 public:
  explicit DcEncoder(const CodeTable& table) {
    std::memcpy(counts_, table.counts, sizeof counts_);
    std::memcpy(symbols_, table.symbols, table.symbol_count);
    size_ = table.symbol_count;
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

size_t MostCutBytes(size_t size) { return size + size / 8 + 1024; }

Result CutWindow(const IndexedJpeg& indexed, const Window& window, uint8_t* out, size_t most, Cut* cut) {
  const Header& header = indexed.header;
  const Region region = indexed.Around(window);
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
  ScanCutter cutter(indexed.jpeg, header, encoders.data(), &bits);
  const Result result =
      indexed.ForEachRun(region, [&cutter](const Run& run) { return cutter.Copy(run); });
  if (result != Result::kOk) return result;
  at = bits.Finish();
  if (!at) return Result::kNoRoom;
  std::memcpy(at, last, sizeof last);
  cut->size = at + sizeof last - out;
  return Result::kOk;
}

}  // namespace jpeg
