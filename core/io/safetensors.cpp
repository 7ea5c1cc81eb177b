// A file is checked whole before a tensor is read: its JSON header in one pass without recursion,
// then names, types, shapes and offsets against the length of the file.
#include "core/io/safetensors.h"
#include <cstring>
#include "core/io/descriptor.h"
#include "core/io/text.h"

namespace hilt {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are read and written as they lie in memory");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeader = std::uint64_t{16} << 20;
constexpr std::size_t kHeaderAlignment = 64;  // so that the first tensor begins at a cache line of the file
constexpr std::string_view kMetadata = "__metadata__";

struct TypeName {
  std::string_view name;
  DType dtype;
};
constexpr TypeName kTypes[] = {{"F64", DType::f64}, {"F32", DType::f32}, {"BF16", DType::bf16}, {"F16", DType::f16},
                               {"I64", DType::i64}, {"I32", DType::i32}, {"U8", DType::u8},     {"BOOL", DType::u8}};

std::string_view type_name(DType dtype) { return std::ranges::find(kTypes, dtype, &TypeName::dtype)->name; }

/// WHAT (value): why, FILE:OFFSET; what to try
template <class Why>
[[noreturn]] void bad(const std::string& path, std::uint64_t offset, const std::string& what, const std::string& value,
                      const Why& why, const char* remedy) {
  fail_with(Code::data, what, " (", value, "): ", why, ", ", path, ":", offset, "; ", remedy);
}

constexpr const char* kCopyAgain = "copy or download the file again";
constexpr const char* kWriteAgain = "write the file again with a safetensors library";

// ---- the header's JSON --------------------------------------------------------------------------

/// What safetensors allows of JSON: an object of objects. One pass over the text, no recursion.
class Header {
 public:
  Header(const std::string& path, std::string_view text, std::uint64_t data_bytes)
      : path_(path), text_(text), data_bytes_(data_bytes) {
    if (!text_.starts_with('{')) wrong(0, "header", next(), "must begin with {");
    list('{', '}', [&] { entry(); });
    const std::size_t end = text_.find_first_not_of(' ', at_);
    if (end != text_.npos) wrong(end, "header", shown(text_.substr(end, 1)), "only blanks may follow its last }");
    sort_and_check();
  }
  std::vector<SafetensorsEntry> entries;
  SafetensorsMetadata metadata;

 private:
  [[noreturn]] void wrong(std::size_t at, const std::string& what, const std::string& value, const std::string& why,
                          const char* remedy = kWriteAgain) const {
    bad(path_, kLengthBytes + at, what, value, why, remedy);
  }
  std::string next() const { return at_ < text_.size() ? shown(text_.substr(at_, 1)) : "its end"; }
  std::size_t here() { return at_ = std::min(text_.find_first_not_of(" \n\t\r", at_), text_.size()); }  // behind blanks
  bool take_at(char c) { return at_ < text_.size() && text_[at_] == c && ++at_; }
  bool take(char c) { return here(), take_at(c); }
  void expect(char c) {
    if (!take(c)) wrong(at_, "header", next(), std::string("expected ") + c);
  }
  template <class F> void list(char opening, char closing, const F& element) {
    expect(opening);
    if (take(closing)) return;
    do element();
    while (take(','));
    if (!take(closing)) wrong(at_, "header", next(), std::string("expected , or ") + closing);
  }

  std::uint32_t unit() {  // the four digits of \uXXXX
    std::uint32_t u = 0;
    const std::string_view digits = text_.substr(at_, 4);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), u, 16);
    at_ += static_cast<std::size_t>(end - digits.data());
    if (end != digits.data() + 4)
      wrong(at_, "escape in a string", next(), "expected four hexadecimal digits after \\u");
    return u;
  }
  void escape(std::string& out) {
    const std::size_t start = at_ - 1;
    const char c = at_ < text_.size() ? text_[at_++] : ' ';
    constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
    if (const std::size_t i = kFrom.find(c); i != kFrom.npos) {
      out += kTo[i];
      return;
    }
    if (c != 'u') wrong(start, "escape in a string", shown(text_.substr(start, 2)), "JSON has no such escape");
    std::uint32_t u = unit();
    const auto is = [](std::uint32_t x, std::uint32_t half) { return x >> 10 == half >> 10; };
    std::uint32_t low = 0;
    if (is(u, 0xd800) && text_.substr(at_).starts_with("\\u")) at_ += 2, low = unit();
    if (is(low, 0xdc00)) u = 0x10000 + ((u - 0xd800) << 10) + (low - 0xdc00);
    else if (is(u, 0xd800) || is(u, 0xdc00))
      wrong(start, "escape in a string", shown(text_.substr(start, 6)), "half of a surrogate pair");
    append_utf8(out, u);
  }
  std::string string(const char* what) {
    if (!take('"')) wrong(at_, what, next(), "expected a string");
    const std::size_t start = at_;
    std::string out;
    while (!take_at('"')) {
      if (at_ == text_.size()) wrong(start - 1, what, shown(text_.substr(start)), "a quote that is not closed");
      const std::size_t from = at_;
      const std::optional<char32_t> c = next_utf8(text_, at_);
      if (!c) wrong(from, what, next(), "not UTF-8");
      if (*c < ' ') wrong(from, what, shown(text_.substr(from, 1)), "a control character in a string");
      if (*c == '\\') escape(out);
      else out += text_.substr(from, at_ - from);
    }
    return out;
  }
  std::int64_t number(const std::string& what) {  // a whole number that is not negative
    const std::size_t start = here();
    at_ = std::min(text_.find_first_not_of("0123456789", start), text_.size());
    const std::optional<std::int64_t> n = number_in<std::int64_t>(text_.substr(start, at_ - start));
    const std::string value = shown(text_.substr(start, std::max<std::size_t>(at_ - start, 1)));
    if (at_ == start)
      wrong(start, what, start < text_.size() ? value : "its end", "expected a whole number that is not negative");
    if (!n) wrong(start, what, value, "exceeds 64 bits");
    if (text_[start] == '0' && at_ > start + 1) wrong(start, what, value, "a number may not begin with 0");
    if (at_ < text_.size() && (text_[at_] == '.' || (text_[at_] | 0x20) == 'e'))
      wrong(start, what, shown(text_.substr(start, at_ - start + 1)), "expected a whole number");
    return *n;
  }

  void entry() {
    const std::size_t start = here();
    std::string name = string("tensor name");
    expect(':');
    if (name == kMetadata) return read_metadata(start);
    SafetensorsEntry e;
    e.name = std::move(name);
    constexpr std::array<std::string_view, 3> kKeys{"dtype", "shape", "data_offsets"};
    std::array<bool, 3> has{};
    list('{', '}', [&] {
      const std::size_t key_at = here();
      const std::string key = string("key");
      expect(':');
      const auto which = static_cast<std::size_t>(std::ranges::find(kKeys, key) - kKeys.begin());
      if (which == kKeys.size())
        wrong(key_at, "key of tensor " + shown(e.name), shown(key), "expected dtype, shape and data_offsets");
      if (std::exchange(has[which], true)) wrong(key_at, "key of tensor " + shown(e.name), shown(key), "appears twice");
      which == 0 ? read_dtype(e) : which == 1 ? read_shape(e) : read_offsets(e);
    });
    for (std::size_t i = 0; i < has.size(); ++i)
      if (!has[i]) wrong(start, "tensor", shown(e.name), "lacks " + std::string(kKeys[i]));
    check_size(e, start);
    entries.push_back(std::move(e));
  }
  void read_dtype(SafetensorsEntry& e) {
    const std::size_t start = here();
    const std::string text = string("dtype");
    const auto* const type = std::ranges::find(kTypes, text, &TypeName::name);
    if (type == std::end(kTypes))
      wrong(start, "dtype of tensor " + shown(e.name), shown(text), "expected one of F64 F32 BF16 F16 I64 I32 U8 BOOL",
            "convert the tensor to one of these and write the file again");
    e.dtype = type->dtype;
  }
  void read_shape(SafetensorsEntry& e) {
    const std::string what = "shape of tensor " + shown(e.name);
    std::int64_t product = 1;  // with 1 for a 0: the others must multiply safely all the same
    list('[', ']', [&] {
      const std::size_t start = here();
      if (e.shape.rank() == Shape::kMaxRank)
        wrong(start, what, "rank 7", "at most 6 axes are supported", "reshape the tensor and write the file again");
      const std::int64_t extent = number(what);
      if (__builtin_mul_overflow(product, std::max<std::int64_t>(extent, 1), &product))
        wrong(start, what, std::to_string(extent), "the product of the extents exceeds 64 bits");
      e.shape.push_back(extent);
    });
  }
  void read_offsets(SafetensorsEntry& e) {
    const std::string what = "data_offsets of tensor " + shown(e.name);
    expect('[');
    const std::size_t start = here();
    const std::int64_t begin = number(what);
    expect(',');
    const std::int64_t end = number(what);
    expect(']');
    const std::string value = std::to_string(begin) + ", " + std::to_string(end);
    if (end < begin) wrong(start, what, value, "the end is before the beginning");
    if (static_cast<std::uint64_t>(end) > data_bytes_)
      wrong(start, what, value, "beyond the " + std::to_string(data_bytes_) + " bytes of tensors that the file has",
            kCopyAgain);
    e.begin = static_cast<std::uint64_t>(begin), e.end = static_cast<std::uint64_t>(end);
  }
  void check_size(const SafetensorsEntry& e, std::size_t start) {
    std::int64_t bytes = 0;
    const bool overflow = __builtin_mul_overflow(e.shape.numel(), static_cast<std::int64_t>(size_of(e.dtype)), &bytes);
    if (overflow || static_cast<std::uint64_t>(bytes) != e.end - e.begin)
      wrong(start, "size of tensor " + shown(e.name), (TextStream() << e.dtype << e.shape).str(),
            overflow
                ? "exceeds 64 bits"
                : "takes " + std::to_string(bytes) + " bytes, data_offsets span " + std::to_string(e.end - e.begin));
  }
  void read_metadata(std::size_t start) {
    if (std::exchange(has_metadata_, true)) wrong(start, "key", std::string(kMetadata), "appears twice");
    list('{', '}', [&] {
      const std::size_t at = here();
      std::string key = string("metadata key");
      expect(':');
      std::string value = string("metadata value");
      const auto [where, fresh] = metadata.try_emplace(std::move(key), std::move(value));
      if (!fresh) wrong(at, "metadata key", shown(where->first), "appears twice");
    });
  }

  void sort_and_check() {  // contiguous from 0 to the end, by name at last
    std::ranges::sort(entries, {}, [](const SafetensorsEntry& e) { return std::tie(e.begin, e.end, e.name); });
    std::uint64_t at = 0;
    const std::uint64_t data = kLengthBytes + text_.size();
    for (SafetensorsEntry& e : entries) {
      if (e.begin != at)
        bad(path_, data + std::min(at, e.begin), "data_offsets of tensor " + shown(e.name),
            std::to_string(e.begin) + ", " + std::to_string(e.end),
            (e.begin < at ? "overlaps the tensor before it, which ends at "
                          : "leaves a hole, the tensor before it ends at ") +
                std::to_string(at),
            kWriteAgain);
      at = e.end;
      e.begin += data, e.end += data;
    }
    if (at != data_bytes_)
      bad(path_, data + at, "trailing bytes", std::to_string(data_bytes_ - at),
          "the last tensor ends at byte " + std::to_string(data + at), kCopyAgain);
    std::ranges::sort(entries, {}, &SafetensorsEntry::name);
    const auto twice = std::ranges::adjacent_find(entries, {}, &SafetensorsEntry::name);
    if (twice != entries.end())
      bad(path_, twice->begin, "tensor name", shown(twice->name), "appears twice", kWriteAgain);
  }

  const std::string& path_;
  std::string_view text_;
  std::uint64_t data_bytes_;
  std::size_t at_ = 0;
  bool has_metadata_ = false;
};

// ---- files --------------------------------------------------------------------------------------

void read_exactly(const Descriptor& file, const std::string& path, std::uint64_t offset, void* to, std::size_t bytes) {
  const std::size_t done = read_at(file, to, bytes, offset);
  if (done == bytes) return;
  const bool failed = errno != 0;
  bad(path, offset + done, "file", path, failed ? std::strerror(errno) : "became shorter while it was read",
      failed ? "check the disk and try again" : "wait until whoever writes it has finished");
}

struct Magic {  // what a file that is not safetensors is, as far as its first bytes tell
  std::string_view bytes, what;
  const char* remedy;
};
constexpr const char* kConvert = "convert it with the safetensors library where you trust its source";
constexpr std::array<Magic, 10> kMagic{{
    {"\x89PNG", "a PNG image", "give a .safetensors file"},
    {"\xff\xd8\xff", "a JPEG image", "give a .safetensors file"},
    {"PK\x03\x04", "a zip archive, as torch.save writes: refused, the pickles in it can run code", kConvert},
    {"\x80", "a pickle: refused, pickles can run code", kConvert},
    {"\x93NUMPY", "a .npy file", "it holds one tensor: use read_npy"},
    {"\x89HDF", "an HDF5 file", kConvert},
    {"GGUF", "a GGUF file", kConvert},
    {"\x1f\x8b", "compressed by gzip", "unpack it first"},
    {"version https://git-lfs", "a Git LFS pointer, not the file itself", "run git lfs pull"},
    {"<", "text, perhaps a web page saved in the file's place", "download the file itself"},
}};

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  const auto refuse = [&](const std::string& why, const char* remedy) {
    bad(path, 0, "file", shown(path), why, remedy);
  };
  // Without O_NONBLOCK, opening a pipe would wait for a writer that may never come.
  file_ = std::make_shared<Descriptor>();  // first: there may be no memory for it
  *file_ = Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!*file_) refuse(std::strerror(errno), "check the name and its permissions");
  struct stat info {};
  if (::fstat(file_->get(), &info) != 0) refuse(std::strerror(errno), "check the disk and try again");
  if (S_ISDIR(info.st_mode)) refuse("is a directory", "name a .safetensors file in it");
  if (!S_ISREG(info.st_mode)) refuse("is not a regular file", "copy it to a regular file");
  bytes_ = static_cast<std::uint64_t>(info.st_size);
  if (bytes_ == 0) refuse("is empty", kCopyAgain);

  std::array<std::byte, 24> first{};
  const auto known = static_cast<std::size_t>(std::min<std::uint64_t>(bytes_, first.size()));
  read_exactly(*file_, path, 0, first.data(), known);
  const std::string_view start(reinterpret_cast<const char*>(first.data()), known);
  std::uint64_t header = 0;
  if (bytes_ >= kLengthBytes) std::memcpy(&header, first.data(), kLengthBytes);
  const bool plausible = header <= kMaxHeader && bytes_ > kLengthBytes && first[kLengthBytes] == std::byte{'{'};
  if (!plausible)
    for (const Magic& m : kMagic)
      if (start.starts_with(m.bytes)) refuse("is " + std::string(m.what), m.remedy);
  if (bytes_ < kLengthBytes) refuse("has " + std::to_string(bytes_) + " bytes, a header's length takes 8", kCopyAgain);
  if (header > kMaxHeader)
    bad(path, 0, "header length", std::to_string(header), "at most " + std::to_string(kMaxHeader) + " is allowed",
        "is this a safetensors file?");
  if (header > bytes_ - kLengthBytes)
    bad(path, 0, "header length", std::to_string(header),
        "header says " + std::to_string(header) + " bytes, file has " + std::to_string(bytes_), kCopyAgain);
  std::string text(static_cast<std::size_t>(header), '\0');
  read_exactly(*file_, path, kLengthBytes, text.data(), text.size());
  Header scanned(path_, text, bytes_ - kLengthBytes - header);
  entries_ = std::move(scanned.entries);
  metadata_ = std::move(scanned.metadata);
}

const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const& {
  const auto at = std::ranges::lower_bound(entries_, name, {}, &SafetensorsEntry::name);
  return at != entries_.end() && at->name == name ? &*at : nullptr;
}

Tensor SafetensorsFile::read(const std::string& name) const {
  const SafetensorsEntry* const e = find(name);
  if (!e) {
    std::vector<std::string_view> names;
    for (const SafetensorsEntry& known : entries_) names.push_back(known.name);
    const std::vector<std::string_view> near = near_names(name, names);
    const std::string remedy = near.empty() ? "no name in it is near" : "did you mean " + shown(near[0]) + "?";
    bad(path_, 0, "tensor", shown(name), "is not in the file", remedy.c_str());
  }
  Tensor t = empty(e->shape, e->dtype);
  read_exactly(*file_, path_, e->begin, t.mutable_raw(), static_cast<std::size_t>(e->end - e->begin));
  return t;
}

// ---- writing ------------------------------------------------------------------------------------
static std::string json_string(std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  bool is_utf8 = true;
  for (std::size_t at = 0; is_utf8 && at < text.size();) is_utf8 = next_utf8(text, at).has_value();
  check(is_utf8, "safetensors: '", is_utf8 ? "" : shown(text), "' is not UTF-8");
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') (out += '\\') += c;
    else if (static_cast<unsigned char>(c) < ' ')
      (out += "\\u00") += {kHex[static_cast<unsigned char>(c) >> 4], kHex[c & 15]};
    else out += c;
  }
  return out + '"';
}

static std::vector<const SafetensorsItem*> sorted(std::span<const SafetensorsItem> items) {
  std::vector<const SafetensorsItem*> out;
  for (const SafetensorsItem& item : items) {
    check(bool(item.tensor), "safetensors: tensor ", shown(item.name), " is undefined");
    check(item.name != kMetadata, "safetensors: a tensor may not be called ", kMetadata);
    out.push_back(&item);
  }
  std::ranges::sort(out, {}, [](const SafetensorsItem* i) -> const std::string& { return i->name; });
  for (std::size_t i = 1; i < out.size(); ++i)
    check(out[i]->name != out[i - 1]->name, "safetensors: two tensors are called ", shown(out[i]->name));
  return out;
}

std::string safetensors_header(std::span<const SafetensorsItem> items, const SafetensorsMetadata& metadata) {
  std::string json = "{";
  for (const auto& [key, value] : metadata)
    json += (json.size() > 1 ? "," : json_string(kMetadata) + ":{") + json_string(key) + ':' + json_string(value);
  if (!metadata.empty()) json += '}';
  std::int64_t at = 0;
  for (const SafetensorsItem* item : sorted(items)) {
    json += (json.size() > 1 ? "," : "") + json_string(item->name) + ":{\"dtype\":\"" +
            std::string(type_name(item->tensor.dtype())) + "\",\"shape\":[";
    for (int axis = 0; axis < item->tensor.rank(); ++axis)
      (json += axis ? "," : "") += std::to_string(item->tensor.dim(axis));
    const std::int64_t end =
        checked_add(at, static_cast<std::int64_t>(item->tensor.bytes()), "safetensors: bytes of all tensors");
    json += "],\"data_offsets\":[" + std::to_string(at) + ',' + std::to_string(end) + "]}";
    at = end;
  }
  json += '}';
  json.append((kHeaderAlignment - (kLengthBytes + json.size()) % kHeaderAlignment) % kHeaderAlignment, ' ');
  check(json.size() <= kMaxHeader, "safetensors: the header would have ", json.size(), " bytes, at most ", kMaxHeader,
        " are allowed");
  std::string out(kLengthBytes, '\0');
  const std::uint64_t length = json.size();
  std::memcpy(out.data(), &length, kLengthBytes);
  return out += json;
}

void write_safetensors(const std::string& path, std::span<const SafetensorsItem> items,
                       const SafetensorsMetadata& metadata) {
  const std::string header = safetensors_header(items, metadata);
  const bool written = write_whole(path, 0600, [&](int descriptor) {
    return write_all(descriptor, header.data(), header.size()) &&
           std::ranges::all_of(sorted(items), [&](const SafetensorsItem* item) {
             const Tensor t = moved(dense(item->tensor), {});
             return write_all(descriptor, t.raw(), t.bytes());
           });
  });
  if (!written) fail_with(Code::data, path, ": cannot write: ", std::strerror(errno));
}

}  // namespace hilt
