#include "jpeg_index.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace jpeg {
namespace {

constexpr int kVersion = 1;
// Distance of points in a row, if MCUs are not wider. Twice as many points would make cuts hardly
// smaller, half as many would make them larger.
constexpr int kPointPixels = 32;

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

Result IndexedJpeg::Open(Bytes file, Bytes index, const Window& window) {
  jpeg = file;
  if (index.size < kFixedBytes + kHashBytes || index.data[0] != kVersion) return Result::kBadIndex;
  const Bytes hashed = {index.data, index.size - kHashBytes};
  spacing_ = index.data[1];
  if (!spacing_ || Load32(index.data + 2) != jpeg.size || Load32(index.data + hashed.size) != Hash(hashed)) {
    return Result::kBadIndex;
  }
  points_ = {index.data + kFixedBytes, hashed.size - kFixedBytes};
  if (const Result result = header.Parse(jpeg); result != Result::kOk) return result;
  if (Load32(index.data + 6) != HashJpeg(jpeg, header)) return Result::kBadIndex;
  return window.top >= 0 && window.left >= 0 && window.height >= 1 && window.width >= 1 &&
                 window.top <= header.height - window.height && window.left <= header.width - window.width
             ? Result::kOk
             : Result::kBadWindow;
}

Region IndexedJpeg::Around(const Window& window) const {
  const int spacing = spacing_;
  const int64_t margin = 1;  // Chroma upsampling uses the neighbours on each side.
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
      if (width * header.component[i].horizontal <= 2 * header.horizontal) return true;
    }
    return false;
  };
  while (is_narrow() && (region.first_column > 0 || region.last_column < header.columns)) {
    region.first_column = std::max<int64_t>(region.first_column - spacing, 0);
    region.last_column = std::min(region.last_column + spacing, header.columns);
  }
  return region;
}

Result IndexedJpeg::ForEachRun(const Region& region,
                               const std::function<Result(const Run&)>& take) const {
  const Points points(header, spacing_);
  IndexReader index(points_);
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
      if (const Result result = take(run); result != Result::kOk) return result;
      open = false;
    }
    if (inside && !open) {
      run.first = mcu;
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
    run.last = mcu;
    run.end = position;
    std::memcpy(run.dc_after, dc, sizeof dc);
    if (!points.IsRestart(mcu)) continue;
    if (open) {
      if (const Result result = take(run); result != Result::kOk) return result;
      open = false;
    }
    BitReader bits(jpeg, position);
    const int marker = bits.MarkerAhead();
    if (marker < kRst0 || marker > kRst7) return Result::kBadIndex;
    bits.SkipMarker();
    position = bits.position();
    std::fill(dc, dc + kMostComponents, 0);
  }
  return open ? take(run) : Result::kOk;
}

}  // namespace jpeg
