// Reads the fields that training needs from a serialized tf.train.Example, without a copy.

#ifndef IMAGENET_FAST_EXAMPLE_H_
#define IMAGENET_FAST_EXAMPLE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace example {

struct Bytes {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

// The index is empty, and height and width are 0, if the record does not have them.
struct Example {
  Bytes encoded, index;
  int64_t label = 0, height = 0, width = 0;
};

namespace internal {

// A protocol buffer message that is read from its start to its end.
struct Message {
  const uint8_t* at;
  const uint8_t* end;

  bool Varint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 64 && at < end; shift += 7) {
      const uint8_t byte = *at++;
      *value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }

  bool Text(Bytes* text) {
    uint64_t size;
    if (!Varint(&size) || size > static_cast<uint64_t>(end - at)) return false;
    *text = {at, static_cast<size_t>(size)};
    at += size;
    return true;
  }
};

inline Message In(const Bytes& bytes) { return {bytes.data, bytes.data + bytes.size}; }

// Tags: a field's number and the kind of its value.
constexpr uint64_t Numbers(int field) { return field << 3; }
constexpr uint64_t Texts(int field) { return field << 3 | 2; }

// Reads a message of one field of text.
inline bool OnlyText(const Bytes& message, int field, Bytes* text) {
  Message in = In(message);
  uint64_t tag;
  return in.Varint(&tag) && tag == Texts(field) && in.Text(text) && in.at == in.end;
}

constexpr int kBytesList = 1, kInt64List = 3;  // fields of a Feature

inline bool ReadBytes(const Bytes& feature, Bytes* value) {
  Bytes list;
  return OnlyText(feature, kBytesList, &list) && OnlyText(list, 1, value);
}

inline bool ReadNumber(const Bytes& feature, int64_t* value) {
  Bytes list, packed;
  if (!OnlyText(feature, kInt64List, &list)) return false;
  uint64_t number, tag;
  Message in = In(list);
  if (OnlyText(list, 1, &packed)) {
    in = In(packed);
  } else if (!in.Varint(&tag) || tag != Numbers(1)) {
    return false;
  }
  if (!in.Varint(&number) || in.at != in.end) return false;
  *value = static_cast<int64_t>(number);
  return true;
}

}  // namespace internal

// Reads a record, its label and its index only if asked to; false if it is not laid out as usual: each
// field once, with one value, whatever their order. Others are for TensorFlow's own parser.
inline bool Read(const uint8_t* record, size_t size, bool with_label, bool with_index, Example* example) {
  using namespace internal;
  const struct {
    const char* name;
    Bytes* bytes;
    int64_t* number;
  } wanted[] = {{"image/encoded", &example->encoded, nullptr},
                {"image/class/label", nullptr, &example->label},
                {"image/height", nullptr, &example->height},
                {"image/width", nullptr, &example->width},
                {"image/jpeg_index", &example->index, nullptr}};
  constexpr unsigned kLabel = 1 << 1;
  const unsigned count = sizeof(wanted) / sizeof(*wanted) - (with_index ? 0 : 1);
  const unsigned needed = 1 << 0 | kLabel;
  unsigned seen = with_label ? 0 : kLabel;
  Bytes features;
  if (!OnlyText({record, size}, 1, &features)) return false;
  for (Message in = In(features); in.at < in.end;) {
    uint64_t tag;
    Bytes entry, key, feature;
    if (!in.Varint(&tag) || tag != Texts(1) || !in.Text(&entry)) return false;
    Message pair = In(entry);
    if (!pair.Varint(&tag) || tag != Texts(1) || !pair.Text(&key) || !pair.Varint(&tag) ||
        tag != Texts(2) || !pair.Text(&feature) || pair.at != pair.end) {
      return false;
    }
    for (unsigned i = 0; i < count; ++i) {
      if (key.size != std::strlen(wanted[i].name) ||
          std::memcmp(key.data, wanted[i].name, key.size) != 0) {
        continue;
      }
      if (1u << i == kLabel && !with_label) continue;
      if (seen & 1u << i) return false;
      seen |= 1u << i;
      if (wanted[i].bytes ? !ReadBytes(feature, wanted[i].bytes)
                          : !ReadNumber(feature, wanted[i].number)) {
        return false;
      }
    }
  }
  return (seen & needed) == needed;
}

}  // namespace example

#endif  // IMAGENET_FAST_EXAMPLE_H_
