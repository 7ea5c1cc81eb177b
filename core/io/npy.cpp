// NumPy's .npy format, versions 1.0, 2.0 and 3.0:
//   byte 0  "\x93NUMPY"      6  version, 2 bytes
//   8  length of the header, 2 bytes little endian, 4 from version 2.0 on
//   then    {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
//           a Python dictionary as text, blanks, a newline
//   then    the elements, one after the other, to the end of the file
#include "core/io/npy.h"
#include <cstring>
#include "core/io/descriptor.h"
#include "core/io/text.h"
#include "core/tensor.h"

namespace hilt {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are read and written as they lie in memory");

constexpr std::size_t kMaxNpyHeader = 65536;  // what version 1.0 can say; six extents need 200
constexpr std::string_view kNpyMagic("\x93NUMPY", 6);

struct NpyType {
  std::string_view descr;
  DType dtype;
};
constexpr NpyType kNpyTypes[] = {{"<f8", DType::f64}, {"<f4", DType::f32}, {"<f2", DType::f16},
                                 {"<i8", DType::i64}, {"<i4", DType::i32}, {"|u1", DType::u8}};

template <class... Parts> [[noreturn]] void bad_npy(const std::string& path, const Parts&... parts) {
  fail_with(Code::data, path, ": ", parts...);
}

std::string in_quotes(std::string_view text) { return "'" + shown(text, 40) + "'"; }

// ---- reading ------------------------------------------------------------------------------------

/// The dictionary: three keys in any order, each once. One pass, a fixed number of looks a byte.
class NpyHeader {
 public:
  NpyHeader(const std::string& path, std::string_view text, std::size_t at) : path_(path), text_(text), offset_(at) {
    expect('{');
    while (!take('}')) {
      const std::size_t start = at_;
      const std::string_view key = string();
      expect(':');
      if (key == "descr" && !dtype) read_type();
      else if (key == "fortran_order" && !fortran) read_bool();
      else if (key == "shape" && !shape) read_shape();
      else
        wrong(start, "key ", in_quotes(key),
              " is unknown or repeated; expected descr, fortran_order and shape, each once");
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    const std::size_t end = at_;
    if (here() != text_.size()) wrong(at_, "expected blanks to the end of the header, got ", next());
    if (!dtype || !fortran || !shape)
      wrong(end, "the header lacks ", !dtype ? "descr" : !fortran ? "fortran_order" : "shape");
  }
  std::optional<DType> dtype;
  std::optional<bool> fortran;
  std::optional<Shape> shape;

 private:
  template <class... Parts> [[noreturn]] void wrong(std::size_t at, const Parts&... parts) const {
    bad_npy(path_, "bad header at byte ", offset_ + at, ": ", parts...);
  }
  std::string next() const { return at_ < text_.size() ? in_quotes(text_.substr(at_, 1)) : "its end"; }
  std::size_t here() { return at_ = std::min(text_.find_first_not_of(" \n", at_), text_.size()); }  // behind blanks
  bool take(char c) { return here() < text_.size() && text_[at_] == c && ++at_; }
  void expect(char c) {
    if (!take(c)) wrong(at_, "expected '", c, "', got ", next());
  }
  std::string_view string() {
    const char quote = here() < text_.size() ? text_[at_] : ' ';
    if (quote != '\'' && quote != '"') wrong(at_, "expected a string in quotes, got ", next());
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) wrong(at_, "a quote that is not closed");
    const std::string_view s = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return s;
  }
  void read_type() {
    const std::size_t start = here();
    if (start < text_.size() && text_[start] == '[')
      wrong(at_, "records of several types are refused; expected one plain type");
    const std::string_view descr = string();
    for (const NpyType& t : kNpyTypes)
      if (descr == t.descr || (t.dtype == DType::u8 && descr == "<u1")) dtype = t.dtype;
    if (dtype) return;
    if (descr.find('O') != descr.npos)
      wrong(start, "type ", in_quotes(descr), " holds pickled objects: refused, pickles can run code");
    if (descr.starts_with('>'))
      wrong(start, "type ", in_quotes(descr),
            " is big endian; expected little endian: in NumPy, x.astype(x.dtype.newbyteorder('<'))");
    wrong(start, "type ", in_quotes(descr), "; expected one of <f8 <f4 <f2 <i8 <i4 |u1: in NumPy, x.astype('",
          descr.find_first_of("iub") != descr.npos ? "<i8" : "<f4", "') for one");
  }
  void read_bool() {
    const std::string_view rest = text_.substr(here());
    if (!rest.starts_with("True") && !rest.starts_with("False")) wrong(at_, "expected True or False, got ", next());
    fortran = rest.starts_with("True");
    at_ += *fortran ? 4 : 5;
  }
  void read_shape() {
    expect('(');
    Shape s;
    bool comma = true;
    while (!take(')')) {
      if (!comma) wrong(at_, "expected ',' or ')', got ", next());
      const std::size_t start = here();
      Index extent = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), extent);
      if (error == std::errc::result_out_of_range) wrong(start, "an extent beyond 64 bits");
      if (error != std::errc{}) wrong(start, "expected an extent, got ", next());
      at_ = static_cast<std::size_t>(end - text_.data());
      try {
        s.push_back(extent);
      } catch (const Error& e) {  // negative, one axis too many, or a product beyond 64 bits
        wrong(start, e.what());
      }
      comma = take(',');
    }
    if (s.rank() == 1 && !comma) wrong(at_ - 1, "expected ',': a shape of one axis is written (", s[0], ",)");
    shape = s;
  }

  const std::string& path_;
  std::string_view text_;
  std::size_t offset_, at_ = 0;
};

void read(const std::string& path, const Descriptor& file, void* to, std::size_t n, std::size_t offset) {
  const std::size_t done = read_at(file, to, n, offset);
  if (done < n)
    bad_npy(path, "cannot read ", n - done, " bytes at byte ", offset + done, ": ",
            errno != 0 ? std::strerror(errno) : "the file became shorter");
}

std::size_t size_of_file(const std::string& path, const Descriptor& file) {
  if (!file) bad_npy(path, "cannot open: ", std::strerror(errno));
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) bad_npy(path, "cannot look at: ", std::strerror(errno));
  if (S_ISDIR(status.st_mode)) bad_npy(path, "is a directory; expected a .npy file");
  if (!S_ISREG(status.st_mode)) bad_npy(path, "is not a regular file; expected a .npy file");
  return static_cast<std::size_t>(status.st_size);
}

[[noreturn]] void not_npy(const std::string& path, std::string_view start) {
  if (start.starts_with("\x89PNG")) bad_npy(path, "is a PNG picture; expected a .npy file");
  if (start.starts_with("PK"))
    bad_npy(path, "is a zip archive, an .npz perhaps; expected a .npy file: in NumPy, np.save each array");
  if (start.size() > 1 && start[0] == '\x80' && start[1] >= 2 && start[1] <= 5)
    bad_npy(path, "is a pickle: refused, pickles can run code");
  bad_npy(path, "is not a .npy file: byte 0 begins ", in_quotes(start.substr(0, kNpyMagic.size())), ", expected ",
          in_quotes(kNpyMagic));
}

Strides fortran_strides(const Shape& shape) {
  Strides strides{};
  Index step = 1;
  for (int axis = 0; axis < shape.rank(); step *= std::max<Index>(shape[axis++], 1))
    strides[static_cast<std::size_t>(axis)] = step;
  return strides;
}

// ---- writing ------------------------------------------------------------------------------------

/// Everything before the elements; they begin at a multiple of 64 bytes.
std::string header_of(std::string_view descr, const Shape& shape) {
  std::string text = "{'descr': '" + std::string(descr) + "', 'fortran_order': False, 'shape': (";
  for (int axis = 0; axis < shape.rank(); ++axis) text += (axis ? ", " : "") + std::to_string(shape[axis]);
  text += shape.rank() == 1 ? ",), }" : "), }";
  text.append(63 - (kNpyMagic.size() + 4 + text.size()) % 64, ' ');
  text += '\n';
  return std::string(kNpyMagic) + '\1' + '\0' + static_cast<char>(text.size() & 0xff) +
         static_cast<char>(text.size() >> 8) + text;
}

}  // namespace

Tensor read_npy(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a pipe answers too, and is refused
  const std::size_t size = size_of_file(path, file);
  if (size == 0) bad_npy(path, "is empty; expected a .npy file");
  const auto need = [&](std::size_t bytes) {
    if (bytes > size) bad_npy(path, "truncated: header says ", bytes, " bytes, file has ", size);
  };

  std::string start(std::min<std::size_t>(size, 12), '\0');
  read(path, file, start.data(), start.size(), 0);
  if (!start.starts_with(kNpyMagic.substr(0, start.size()))) not_npy(path, start);
  need(8);
  const int major = static_cast<unsigned char>(start[6]), minor = static_cast<unsigned char>(start[7]);
  if (major < 1 || major > 3 || minor != 0)
    bad_npy(path, "version ", major, '.', minor, " at byte 6; expected 1.0, 2.0 or 3.0");
  const std::size_t header_at = major == 1 ? 10 : 12;
  need(header_at);
  std::size_t length = 0;
  for (std::size_t i = header_at; i-- > 8;) length = length << 8 | static_cast<unsigned char>(start[i]);
  if (length > kMaxNpyHeader)
    bad_npy(path, "a header of ", length, " bytes at byte 8; expected ", kMaxNpyHeader, " at most");
  need(header_at + length);
  std::string text(length, '\0');
  read(path, file, text.data(), length, header_at);
  const NpyHeader header(path, text, header_at);

  const std::size_t data_at = header_at + length;
  Index bytes = 0;
  if (__builtin_mul_overflow(header.shape->numel(), static_cast<Index>(size_of(*header.dtype)), &bytes) ||
      __builtin_add_overflow(bytes, static_cast<Index>(data_at), &bytes))
    bad_npy(path, "truncated: header says more bytes than 64 bits count, ", *header.dtype, *header.shape, ", file has ",
            size);
  need(static_cast<std::size_t>(bytes));
  if (static_cast<std::size_t>(bytes) < size)
    bad_npy(path, "trailing bytes at byte ", bytes, ": header says ", bytes, " bytes, file has ", size);

  Tensor x = empty(*header.fortran ? Shape{header.shape->numel()} : *header.shape, *header.dtype);
  read(path, file, x.mutable_raw(), x.bytes(), data_at);
  return *header.fortran ? as_strided(x, *header.shape, fortran_strides(*header.shape), 0) : x;
}

NpyIntegers read_npy_integers(const std::string& path) {
  const Tensor x = read_npy(path);
  return {x.dtype(), x.shape(), is_floating(x.dtype()) ? std::vector<std::int64_t>{} : x.to_vector<std::int64_t>()};
}

void write_npy(const std::string& path, const Tensor& tensor) {
  check(bool(tensor), "write_npy: undefined tensor");
  check(tensor.device().is_cpu(), "write_npy: a tensor on ", tensor.device(), "; copy it with to(x, Device{})");
  const auto* const type = std::ranges::find(kNpyTypes, tensor.dtype(), &NpyType::dtype);
  check(type != std::end(kNpyTypes), "write_npy: .npy has no ", tensor.dtype(), "; convert with to(x, DType::f32)");
  const Tensor x = dense(tensor);
  const std::string header = header_of(type->descr, x.shape());

  bool opened = false;
  const bool written = write_whole(path, 0666, [&](int descriptor) {
    opened = true;
    return write_all(descriptor, header.data(), header.size()) && write_all(descriptor, x.raw(), x.bytes());
  });
  if (written) return;
  const char* const why = std::strerror(errno);
  if (!opened) bad_npy(path, "cannot write: making ", path, ".tmp.*: ", why);
  bad_npy(path, "cannot write ", header.size() + x.bytes(), " bytes: ", why, "; nothing was left behind");
}

}  // namespace hilt
