#include "core/npy.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <random>
#include <string_view>

namespace hilt {
namespace {

constexpr std::size_t kMaxHeader = 65536;
constexpr std::string_view kMagic("\x93NUMPY", 6);

struct Type { std::string_view descr; DType dtype; };
constexpr std::array<Type, 6> kTypes{{{"<f8", DType::f64}, {"<f4", DType::f32}, {"<f2", DType::f16}, {"<i8", DType::i64}, {"<i4", DType::i32}, {"|u1", DType::u8}}};

template <class... Parts>
[[noreturn]] void bad(const std::string& path, const Parts&... parts) {
  fail_with(Code::data, path, ": ", parts...);
}

/// An open file that closes itself.
class File {
 public:
  File(const std::string& path, int flags, mode_t mode = 0) : descriptor_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int get() const { return descriptor_; }
  int close() { return ::close(std::exchange(descriptor_, -1)); }

 private:
  int descriptor_;
};

void read_at(const std::string& path, const File& file, void* to, std::size_t n, std::size_t offset) {
  for (std::size_t done = 0; done < n;) {
    const ssize_t got = ::pread(file.get(), static_cast<char*>(to) + done, n - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) bad(path, "reading ", n - done, " bytes at byte ", offset + done, " failed: ", got < 0 ? std::strerror(errno) : "the file became shorter");
    done += static_cast<std::size_t>(got);
  }
}

/// The header's dictionary: {'descr': '<f8', 'fortran_order': False, 'shape': (3, 4), }, keys in any order, each once.
class Header {
 public:
  Header(const std::string& path, std::string_view text, std::size_t offset) : path_(path), text_(text), offset_(offset) {
    expect('{');
    while (!take('}')) {
      const std::string_view key = quoted();
      expect(':');
      if (key == "descr" && !dtype) read_type();
      else if (key == "fortran_order" && !fortran) fortran = read_bool();
      else if (key == "shape" && !shape) read_shape();
      else wrong("an unknown or repeated key '", key, "'");
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    space();
    if (at_ != text_.size()) wrong("expected the end of the header");
    if (!dtype || !fortran || !shape) wrong("the header lacks descr, fortran_order or shape");
  }
  std::optional<DType> dtype;
  std::optional<bool> fortran;
  std::optional<Shape> shape;

 private:
  template <class... Parts>
  [[noreturn]] void wrong(const Parts&... parts) const {
    bad(path_, "bad header at byte ", offset_ + at_, ": ", parts...);
  }
  void space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool take(char c) {
    space();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) wrong("expected '", c, "'");
  }
  std::string_view quoted() {
    space();
    const char quote = at_ < text_.size() ? text_[at_] : ' ';
    if (quote != '\'' && quote != '"') wrong("expected a quoted name");
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) wrong("a quote is not closed");
    const std::string_view s = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return s;
  }
  void read_type() {
    space();
    if (at_ < text_.size() && text_[at_] == '[') wrong("records are refused; expected one plain type");
    const std::string_view descr = quoted();
    for (const Type& t : kTypes)
      if (descr == t.descr || (t.dtype == DType::u8 && (descr == "<u1" || descr == "u1"))) {
        dtype = t.dtype;
        return;
      }
    if (descr.find('O') != std::string_view::npos) wrong("type '", descr, "' holds pickled objects: refused, pickles can run code");
    if (!descr.empty() && descr[0] == '>') wrong("type '", descr, "' is big endian; write it with .astype('<f4') or alike");
    wrong("type '", descr, "' is not one of f8 f4 f2 i8 i4 u1, little endian");
  }
  bool read_bool() {
    space();
    for (const auto& [word, value] : {std::pair<std::string_view, bool>("True", true), {"False", false}})
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return value;
      }
    wrong("expected True or False");
  }
  void read_shape() {
    expect('(');
    Shape s;
    while (!take(')')) {
      space();
      Index extent = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), extent);
      if (error != std::errc{} || extent < 0) wrong("expected an extent");
      at_ = static_cast<std::size_t>(end - text_.data());
      if (s.rank() == Shape::kMaxRank) wrong("more than ", Shape::kMaxRank, " axes");
      try {
        s.push_back(extent);
      } catch (const Error&) {
        wrong("the extents multiply beyond 64 bits");
      }
      if (!take(',')) {
        expect(')');
        break;
      }
    }
    shape = s;
  }

  const std::string& path_;
  std::string_view text_;
  std::size_t offset_, at_ = 0;
};

}  // namespace

Tensor read_npy(const std::string& path) {
  const File file(path, O_RDONLY | O_NONBLOCK);
  if (file.get() < 0) bad(path, "cannot open: ", std::strerror(errno));
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) bad(path, "cannot stat: ", std::strerror(errno));
  if (S_ISDIR(status.st_mode)) bad(path, "is a directory, expected a .npy file");
  if (!S_ISREG(status.st_mode)) bad(path, "is not a regular file");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) bad(path, "is empty, expected a .npy file");
  std::array<unsigned char, 12> start{};
  read_at(path, file, start.data(), std::min(size, start.size()), 0);
  if (start[0] == 0x89 && start[1] == 'P') bad(path, "is a PNG, expected a .npy file");
  if (start[0] == 0x80 && start[1] >= 2 && start[1] <= 5) bad(path, "is a pickle: refused, pickles can run code");
  if (start[0] == 'P' && start[1] == 'K') bad(path, "is a zip (.npz?), expected a .npy file");
  if (size < 10 || std::memcmp(start.data(), kMagic.data(), kMagic.size()) != 0) bad(path, "is no .npy file: byte 0 should begin \\x93NUMPY");
  const int major = start[6];
  if (major < 1 || major > 3) bad(path, "version ", major, ".", int{start[7]}, " at byte 6; expected 1.0, 2.0 or 3.0");
  const std::size_t length_bytes = major == 1 ? 2 : 4, header_at = 8 + length_bytes;
  std::size_t header_size = 0;
  if (size < header_at) bad(path, "is truncated: ", size, " bytes");
  for (std::size_t i = length_bytes; i-- > 0;) header_size = header_size << 8 | start[8 + i];
  if (header_size > kMaxHeader) bad(path, "header length ", header_size, " at byte 8 exceeds ", kMaxHeader);
  if (header_at + header_size > size) bad(path, "is truncated: the header says ", header_at + header_size, " bytes, the file has ", size);
  std::string text(header_size, ' ');
  read_at(path, file, text.data(), header_size, header_at);
  const Header header(path, text, header_at);

  const std::size_t data_at = header_at + header_size, element = size_of(*header.dtype);
  const auto count = static_cast<std::size_t>(header.shape->numel());
  if (count > (size - data_at) / element || count * element != size - data_at)
    bad(path, count > (size - data_at) / element ? "is truncated" : "has trailing bytes", ": the header says ", data_at, " + ", count, " x ", element, " bytes, the file has ", size);
  if (!*header.fortran) {
    Tensor x = empty(*header.shape, *header.dtype);
    read_at(path, file, x.mutable_raw(), count * element, data_at);
    return x;
  }
  Tensor flat = empty({header.shape->numel()}, *header.dtype);
  read_at(path, file, flat.mutable_raw(), count * element, data_at);
  Strides strides{};
  Index step = 1;
  for (int axis = 0; axis < header.shape->rank(); ++axis) {
    strides[static_cast<std::size_t>(axis)] = step;
    step *= std::max<Index>((*header.shape)[axis], 1);
  }
  return as_strided(flat, *header.shape, strides, 0);
}

void write_npy(const std::string& path, const Tensor& in) {
  check(bool(in), "write_npy: undefined tensor");
  const Type* type = nullptr;
  for (const Type& t : kTypes)
    if (t.dtype == in.dtype()) type = &t;
  check(type != nullptr, "write_npy: .npy files have no ", in.dtype(), "; convert with to(x, DType::f32)");
  const Tensor x = dense(in);
  std::string header = "{'descr': '" + std::string(type->descr) + "', 'fortran_order': False, 'shape': (";
  for (Index extent : x.shape()) header += std::to_string(extent) + (x.rank() == 1 ? "," : ", ");
  if (x.rank() > 1) header.resize(header.size() - 2);
  header += "), }";
  header.append(63 - (10 + header.size()) % 64, ' ');  // data begins at a multiple of 64
  header += '\n';
  std::string start(kMagic);
  start += {'\1', '\0', static_cast<char>(header.size() & 0xff), static_cast<char>(header.size() >> 8)};
  start += header;

  const std::string temporary = path + ".tmp." + std::to_string(std::random_device{}());
  File file(temporary, O_WRONLY | O_CREAT | O_EXCL, 0666);
  if (file.get() < 0) bad(path, "cannot create ", temporary, ": ", std::strerror(errno));
  const auto write_all = [&](const void* from, std::size_t n) {
    for (std::size_t done = 0; done < n;) {
      const ssize_t wrote = ::write(file.get(), static_cast<const char*>(from) + done, n - done);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) return false;
      done += static_cast<std::size_t>(wrote);
    }
    return true;
  };
  if (!write_all(start.data(), start.size()) || !write_all(x.raw(), x.bytes()) || file.close() != 0 || ::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary.c_str());
    bad(path, "cannot write ", start.size() + x.bytes(), " bytes: ", std::strerror(error), "; nothing was left behind");
  }
}

}  // namespace hilt
