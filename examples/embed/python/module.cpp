// The module hilt._hilt: tensors of other libraries, lent to attention for the length of a call;
// plans; errors. What people see of it is in hilt/__init__.py.
#include <hilt/hilt.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <chrono>
#include <optional>
#include <string>

namespace nb = nanobind;
using namespace hilt;

namespace {

// ---- tensors in ---------------------------------------------------------------------------------

/// What a call gives back: a tensor whose memory others share, by DLPack or the array interface.
struct Array {
  Tensor tensor;
};

std::string text_of(const nb::object& x) { return nb::cast<std::string>(nb::steal(PyObject_Str(x.ptr()))); }

/// torch's types, found by name once: there is one object of each.
DType dtype_of_torch(const nb::object& type, bool whole) {
  static std::vector<std::pair<PyObject*, DType>> known;
  for (const auto& [object, dtype] : known)
    if (object == type.ptr() && is_floating(dtype) != whole) return dtype;
  const std::string name = text_of(type);
  const std::pair<const char*, DType> types[] = {{"torch.float32", DType::f32},   {"torch.float64", DType::f64},
                                                 {"torch.bfloat16", DType::bf16}, {"torch.float16", DType::f16},
                                                 {"torch.int32", DType::i32},     {"torch.int64", DType::i64}};
  for (const auto& [text, dtype] : types)
    if (name == text && is_floating(dtype) != whole) return known.emplace_back(type.inc_ref().ptr(), dtype).second;
  fail("attention: a tensor of type ", name, "; expected torch.",
       whole ? "int32 or int64" : "float32, float64, bfloat16 or float16",
       name == "torch.bool" ? "; as a bias a mask is torch.where(mask, 0.0, -torch.inf)" : "");
}

/// What a torch tensor is asked for; a text each time would cost as much as its answer.
struct Names {
  static nb::handle made(const char* text) { return PyUnicode_InternFromString(text); }
  nb::handle shape = made("shape"), stride = made("stride"), dtype = made("dtype"), is_cpu = made("is_cpu"),
             is_cuda = made("is_cuda"), get_device = made("get_device"), data_ptr = made("data_ptr");
};
const Names& names() {
  static const Names made;
  return made;
}

/// DLPack's table of a library: it makes a tensor of what it is lent, and looks at one, in C.
struct Exchange {
  dlpack::DLPackVersion version;
  const void *older, *allocate, *lend;
  int (*take)(dlpack::DLManagedTensorVersioned*, void**);
  int (*look)(void*, dlpack::DLTensor*);  // or null
};
const Exchange* exchange_of(nb::handle x) {  // null before torch 2.10
  constexpr const char* kName = "dlpack_exchange_api";
  static std::pair<nb::handle, const Exchange*> last;  // a type that is never freed, and its table
  if (x.type().is(last.first)) return last.second;
  const nb::object capsule = nb::getattr(x.type(), "__dlpack_c_exchange_api__", nb::none());
  const bool is_one = PyCapsule_IsValid(capsule.ptr(), kName);
  const auto* const table = static_cast<const Exchange*>(is_one ? PyCapsule_GetPointer(capsule.ptr(), kName) : nullptr);
  last = {x.type().inc_ref(), table && table->version.major == 1 ? table : nullptr};
  return last.second;
}

/// A torch tensor where it lies. That table, or a few attributes, cost less than a DLPack capsule,
/// and need no reference: the caller holds it until the call is over.
Tensor of_torch(nb::handle x, bool whole) {
  const DType dtype = dtype_of_torch(x.attr(names().dtype), whole);
  thread_local dlpack::DLManagedTensorVersioned seen{{1, 0}, nullptr, nullptr, 0, {}};  // has nothing to give back
  dlpack::DLTensor& t = seen.dl_tensor;
  const Exchange* const table = exchange_of(x);
  if (table && table->look && table->look(x.ptr(), &t) == 0 && t.data && t.device.device_type <= dlpack::kCudaHost)
    return from_dlpack(&seen);
  PyErr_Clear();  // attributes say why
  auto extents = nb::cast<std::vector<Index>>(x.attr(names().shape)),
       steps = nb::cast<std::vector<Index>>(x.attr(names().stride)());
  const auto code = whole ? dlpack::kInt : dtype == DType::bf16 ? dlpack::kBfloat : dlpack::kFloat;
  const dlpack::DLDataType type{code, static_cast<std::uint8_t>(8 * size_of(dtype)), 1};
  t = {nullptr, {dlpack::kCpu, 0}, static_cast<int>(extents.size()), type, extents.data(), steps.data(), 0};
  if (!nb::cast<bool>(x.attr(names().is_cpu))) {
    if (!nb::cast<bool>(x.attr(names().is_cuda)))
      fail("attention: a tensor on ", text_of(x.attr("device")), "; expected cpu or cuda; move it there with .to()");
    t.device = {dlpack::kCuda, nb::cast<int>(x.attr(names().get_device)())};
  }
  const Shape shape{std::span<const Index>(extents)};
  if (shape.numel() > 0) t.data = PyLong_AsVoidPtr(nb::object(x.attr(names().data_ptr)()).ptr());
  check(t.data || shape.numel() == 0, "attention: a tensor ", shape,
        " without memory (on the meta device, or a tracer's)");
  return from_dlpack(&seen);
}

template <class Managed> Tensor take(nb::handle capsule, const char* name, const char* used) {
  auto* const managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), name));
  Tensor x = from_dlpack(managed);
  PyCapsule_SetName(capsule.ptr(), used);
  return x;
}
/// Anything that lends itself by DLPack; what it lends read-only is copied.
Tensor of_dlpack(nb::handle x) {
  if (!nb::hasattr(x, "__dlpack__"))
    fail("attention: a ", text_of(x.type().attr("__name__")),
         "; expected a tensor of torch, NumPy, JAX or another library with __dlpack__");
  const auto [kind, index] = nb::cast<std::pair<int, int>>(x.attr("__dlpack_device__")());
  nb::dict how;  // a GPU's library orders what it was asked before ours
  if (kind == dlpack::kCuda)
    how["stream"] = reinterpret_cast<std::uintptr_t>(compute_stream({Device::Kind::cuda, index}));
  nb::object capsule;
  try {
    capsule = x.attr("__dlpack__")(**how);
  } catch (const nb::python_error& e) {
    if (!e.matches(PyExc_Exception)) throw;
    fail("attention: a ", text_of(x.type().attr("__name__")),
         " that does not lend itself: ", nb::str(e.value()).c_str());
  }
  return PyCapsule_IsValid(capsule.ptr(), "dltensor")
             ? take<dlpack::DLManagedTensor>(capsule, "dltensor", "used_dltensor")
             : take<dlpack::DLManagedTensorVersioned>(capsule, "dltensor_versioned", "used_dltensor_versioned");
}

/// whole: of whole numbers, where torch says so.
Tensor tensor_of(nb::handle x, bool whole = false) {
  if (x.is_none()) return {};
  if (nb::hasattr(x, names().data_ptr)) return of_torch(x, whole);
  return nb::isinstance<Array>(x) ? nb::cast<Array&>(x).tensor : of_dlpack(x);
}

// ---- tensors out --------------------------------------------------------------------------------

nb::object capsule_of(const Array& x) {
  auto lent = to_dlpack_legacy(x.tensor);
  PyObject* const capsule = PyCapsule_New(lent.get(), "dltensor", [](PyObject* c) {
    if (!PyCapsule_IsValid(c, "dltensor")) return;  // somebody took it
    dlpack::Release{}(static_cast<dlpack::DLManagedTensor*>(PyCapsule_GetPointer(c, "dltensor")));
  });
  if (!capsule) throw nb::python_error();
  (void)lent.release();
  return nb::steal(capsule);
}

/// None, a tensor of the library of `like` where it has a table, or else an Array.
nb::object given_back(Tensor x, nb::handle like) {
  const Exchange* const to = exchange_of(like);
  if (!x || !to) return x ? nb::cast(Array{std::move(x)}) : nb::none();
  auto lent = to_dlpack(x, dlpack::Access::write);
  void* made = nullptr;
  if (to->take(lent.get(), &made) != 0) throw nb::python_error();
  (void)lent.release();
  return nb::steal(static_cast<PyObject*>(made));
}

nb::dict array_interface(Array& x) {
  check(x.tensor.device().is_cpu() && x.tensor.dtype() != DType::bf16, "NumPy has no arrays of ", x.tensor.dtype(),
        " on ", x.tensor.device(), "; take it with torch.from_dlpack");
  nb::list shape, strides;
  for (int i = 0; i < x.tensor.rank(); ++i) {
    shape.append(x.tensor.dim(i));
    strides.append(x.tensor.stride(i) * static_cast<Index>(size_of(x.tensor.dtype())));
  }
  nb::dict d;
  d["version"] = 3;
  d["shape"] = nb::tuple(shape);
  d["strides"] = nb::tuple(strides);
  d["typestr"] = (is_floating(x.tensor.dtype()) ? "<f" : "<i") + std::to_string(size_of(x.tensor.dtype()));
  d["data"] = nb::make_tuple(reinterpret_cast<std::uintptr_t>(x.tensor.mutable_raw()), false);
  return d;
}

// ---- plans --------------------------------------------------------------------------------------

using Queries = std::optional<std::vector<std::int32_t>>;
struct NativePlan {
  PlanPtr plan;
  NativePlan(Index length, Index heads, const std::string& order, const std::string& pattern, const std::string& causal,
             const std::string& dilation_mode, const std::string& documents, const Queries& queries) {
    const AttentionSettings asked{
        .order = order, .pattern = pattern, .dilation_mode = dilation_mode, .causal = causal, .documents = documents};
    PlanSpec spec = plan_spec(asked, length, heads);
    spec.queries = queries;
    const nb::gil_scoped_release others;
    plan = make_plan(spec);
  }
};

nb::dict stats_of(const NativePlan& p) {
  const TileStats s = p.plan->stats();
  nb::dict d;
  d["order"] = to_string(p.plan->spec().order);
  d["pattern"] = to_string(p.plan->spec().pattern);
  d["tiles_full"] = s.full;
  d["tiles_partial"] = s.partial;
  d["tiles_total"] = s.total;
  d["touched"] = s.touched();
  d["useful_fraction"] = s.useful();
  d["pairs"] = s.pairs;
  d["empty_rows"] = p.plan->empty_rows();
  d["bytes"] = p.plan->bytes();
  return d;
}

// ---- attention ----------------------------------------------------------------------------------

using Number = std::optional<double>;
/// All of a call but its tensors.
struct NativeCall {
  PlanPtr plan;
  AttentionOptions options;
  NativeCall(const NativePlan& p, const std::string& backward, Number scale, Number softcap, bool alibi, double dropout)
      : plan(p.plan), options{.backward = parse_backward(backward), .scale = scale, .dropout = dropout} {
    options.terms.softcap = softcap, options.terms.alibi = alibi;
  }
};

/// The nine tensors of a call: q, k, v, the slopes, relative, bias, sink, the permutation, points.
struct Inputs {
  Tensor q, k, v;
  AttentionOptions options;
};
Inputs inputs_of(const NativeCall& call, std::optional<std::uint64_t> seed, const nb::tuple& x) {
  Inputs in{tensor_of(x[0]), tensor_of(x[1]), tensor_of(x[2]), call.options};
  const Index length = call.plan->length();
  if (in.k && in.k.rank() == 4 && in.k.dim(1) != length && in.k.dim(2) == length)
    fail("attention: k ", in.k.shape(), " for a plan of ", length,
         " tokens looks like [batch, heads, length, dim]; expected [batch, length, heads, dim]: "
         "q.transpose(1, 2), also of k and v, copies nothing");
  if (seed) in.options.key = RandomKey{*seed, 0};
  ScoreTerms& terms = in.options.terms;
  terms.slopes = tensor_of(x[3]), terms.relative = tensor_of(x[4]);
  terms.bias = tensor_of(x[5]), terms.sink = tensor_of(x[6]);
  in.options.permutation = tensor_of(x[7], true), terms.points = tensor_of(x[8], true);
  terms.alibi = terms.alibi || terms.slopes;
  check(in.options.dropout == 0 || in.options.key, "attention: dropout ", in.options.dropout,
        " needs a seed: pass seed=, another one each step");
  return in;
}

/// torch's side of a GPU: the stream it uses on one now, and its allocator. Never given back.
struct Host {
  nb::handle stream, take, give;
} host;

std::shared_ptr<const HostStream::Memory> memory_for(nb::object stream) {
  const auto take = [stream = stream.ptr()](std::size_t bytes) {
    return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(host.take(bytes, nb::handle(stream))));
  };
  const auto give = [](void* p) {
    if (!Py_IsInitialized()) return;  // at the end of the process torch's allocator is gone before
    const nb::gil_scoped_acquire held;
    try {
      host.give(reinterpret_cast<std::uintptr_t>(p));
    } catch (nb::python_error& e) { e.discard_as_unraisable("hilt: memory given back"); }
  };
  return std::make_shared<HostStream::Memory>(HostStream::Memory{take, give});
}

/// What the library itself took of this thread's last call, without the way in and out.
thread_local double last_seconds = 0;
/// f() on torch's stream where q is torch's and on a GPU, with other threads of Python elsewhere:
/// there a call only asks for work, and torch's allocator is asked in Python.
template <class F> void timed(const Tensor& q, nb::handle given, F&& f) {
  std::optional<nb::gil_scoped_release> others;
  std::optional<HostStream> on;
  nb::object stream;
  if (q.device().is_cpu() || !host.stream.is_valid() || !nb::hasattr(given, "data_ptr")) others.emplace();
  else {
    stream = host.stream(q.device().index);
    on.emplace(q.device(), reinterpret_cast<void*>(nb::cast<std::uintptr_t>(stream)), memory_for(stream));
  }
  const auto start = std::chrono::steady_clock::now();
  f();
  last_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

nb::tuple forward(const NativeCall& call, std::optional<std::uint64_t> seed, bool with_lse, const nb::tuple& tensors) {
  const Inputs in = inputs_of(call, seed, tensors);
  AttentionResult r;
  timed(in.q, tensors[0], [&] {
    if (with_lse) r = attention_with_lse(in.q, in.k, in.v, call.plan, in.options);
    else r.o = attention(in.q, in.k, in.v, call.plan, in.options);
  });
  return nb::make_tuple(given_back(std::move(r.o), tensors[0]), given_back(std::move(r.lse), tensors[0]));
}

/// Gradients of those that are wanted and there. known: forward's o, lse, theirs.
nb::list backward(const NativeCall& call, std::optional<std::uint64_t> seed, const nb::sequence& wanted,
                  const nb::tuple& tensors, const nb::tuple& known) {
  const Inputs in = inputs_of(call, seed, tensors);
  const AttentionResult given{tensor_of(known[0]), tensor_of(known[1])},
      given_d{tensor_of(known[2]), tensor_of(known[3])};
  unsigned bits = 0, bit = 1;
  for (const nb::handle w : wanted) bits |= nb::cast<bool>(w) ? bit : 0, bit <<= 1;
  const auto check_alike = [](const char* name, const Tensor& d, const Tensor& x) {
    check(!d || (d.shape() == x.shape() && d.dtype() == x.dtype()), "attention: a gradient ", d.dtype(), d.shape(),
          " for ", name, " ", x.dtype(), x.shape());
  };
  check_alike("o", given_d.o, given.o), check_alike("lse", given_d.lse, given.lse);
  std::vector<Tensor> d;
  timed(in.q, tensors[0], [&] {
    const Tensor dy = given_d.o ? given_d.o : zeros_like(given.o);
    d = attention_gradients(in.q, in.k, in.v, given, {dy, given_d.lse}, call.plan, in.options, bits);
  });
  nb::list out;
  for (Tensor& x : d) out.append(given_back(std::move(x), tensors[0]));
  return out;
}

}  // namespace

#undef NB_DOMAIN_STR  // two files of this module in one process have types of their own
#define NB_DOMAIN_STR std::to_string(reinterpret_cast<std::uintptr_t>(&host)).c_str()

NB_MODULE(_hilt, m) {
  nb::set_leak_warnings(false);  // plans that are kept outlive the interpreter
  static nb::handle error;       // hilt.Error, for as long as the process lives
  m.def("set_error", [](nb::object type) { error = type.release(); });
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& e) {
      const nb::object raised = error(e.what(), static_cast<int>(e.code()));
      PyErr_SetObject(error.ptr(), raised.ptr());
    }
  });
  nb::class_<Array>(m, "Array")
      .def("capsule", capsule_of)
      .def("__dlpack__",
           [](const Array& x, nb::kwargs) {
             synchronize(x.tensor.device());  // a consumer knows nothing of our stream
             return capsule_of(x);
           })
      .def("__dlpack_device__",
           [](const Array& x) {
             const Device d = x.tensor.device();
             return d.is_cpu() ? std::pair{dlpack::kCpu, 0} : std::pair{dlpack::kCuda, d.index};
           })
      .def_prop_ro("__array_interface__", array_interface);
  using Text = const std::string&;
  nb::class_<NativePlan>(m, "Plan")
      .def(nb::init<Index, Index, Text, Text, Text, Text, Text, const Queries&>())
      .def("stats", stats_of)
      .def("tokens", [](const NativePlan& p) { return p.plan->order().token_at; })
      .def("grid", [](const NativePlan& p) { return std::pair(p.plan->grid().height, p.plan->grid().width); })
      .def("attends", [](const NativePlan& p, Index head, Index t, Index u) { return p.plan->attends(head, t, u); });
  nb::class_<NativeCall>(m, "Call").def(nb::init<const NativePlan&, Text, Number, Number, bool, double>());
  m.def("forward", forward);
  m.def("backward", backward);
  m.def("order_of_points", [](nb::handle points, Text kind, int bits, const std::vector<Index>& documents) {
    const bool whole = nb::hasattr(points, "is_floating_point") && !nb::cast<bool>(points.attr("is_floating_point")());
    return Array{order_of_points(tensor_of(points, whole), kind, bits, documents).token_at};
  });
  m.def("set_host", [](nb::object stream, nb::object take, nb::object give) {
    host = {stream.release(), take.release(), give.release()};
  });
  // For tests: where a lent tensor begins, the most bytes held since asked, the last call's time.
  m.def("address", [](nb::handle x) { return reinterpret_cast<std::uintptr_t>(tensor_of(x).raw()); });
  m.def("peak_bytes", [] {
    const std::size_t peak = memory_stats().peak - memory_stats().live;
    reset_memory_peak();
    return peak;
  });
  m.def("last_seconds", [] { return last_seconds; });
  m.def("set_thread_count", set_thread_count);
  m.def("did_you_mean",
        [](std::string_view name, const std::vector<std::string_view>& names) { return did_you_mean(name, names); });
  // The table of what an attention is told: name, what Python says of it, and the names it takes.
  nb::list settings;
  for (const AttentionSetting& s : attention_settings())
    settings.append(nb::make_tuple(s.name, s.tensor.empty() ? s.help : s.tensor, s.choices));
  m.attr("settings") = settings;
  const PlanSpec defaults;  // whose order is row
  nb::dict words;
  words["order"] = to_string(defaults.order);
  words["pattern"] = to_string(defaults.pattern);
  words["causal"] = name_of(defaults.causality);
  words["dilation_mode"] = name_of(defaults.dilation_mode);
  m.attr("defaults") = words;
  m.attr("default_backward") = AttentionSettings().backward;
  m.attr("version") = kVersion;
}
