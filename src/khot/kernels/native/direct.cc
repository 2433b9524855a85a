// khot.kernels._direct: the two calls of a training step, from Python to the library without ctypes.
//
// It is built for the stable ABI of Python 3.11, and reads tensors through DLPack's table of C functions
// (`Tensor.__dlpack_c_exchange_api__`), so that one build serves every later Python and every torch that has the table.
// Both functions decline what is not simple by returning None; ops/_topk.py then takes the general way, with its checks.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "khot.h"

namespace {

// ── DLPack 1.x, as far as it is read ─────────────────────────────────────────────────────────────────────────────────
struct Tensor {
  void* data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct Exchange {
  uint32_t major, minor;
  Exchange* previous;
  void *allocate, *from_object, *to_object;
  int (*view)(PyObject* object, Tensor* out);  // non-owning
};
constexpr int32_t kCpu = 1;
constexpr uint8_t kFloating = 2, kBool = 6;

// ── what `bind` was given ────────────────────────────────────────────────────────────────────────────────────────────
void (*solve)(const khot_rows* rows, void* y);
void (*solve_pull)(const khot_rows* rows, const void* g, void* dx, double* dk);
const Exchange* exchange;
int32_t path;
// Functions and types of torch, and what ops/_topk.py has.
struct Names {
  PyObject *tensor, *parameter, *empty_like, *get_num_threads, *is_grad_enabled, *watchers, *forward_level, *forward_ad,
      *oddities, *cdfs, *apply, *backward;
} names;
struct Slot {
  const char* name;
  PyObject** place;
};
const Slot kSlots[] = {{"tensor", &names.tensor},
                       {"parameter", &names.parameter},
                       {"empty_like", &names.empty_like},
                       {"get_num_threads", &names.get_num_threads},
                       {"is_grad_enabled", &names.is_grad_enabled},
                       {"watchers", &names.watchers},
                       {"forward_level", &names.forward_level},
                       {"forward_ad", &names.forward_ad},
                       {"oddities", &names.oddities},
                       {"cdfs", &names.cdfs},
                       {"apply", &names.apply},
                       {"backward", &names.backward}};
PyObject *requires_grad, *contiguous, *saved_tensors, *of_cdf, *of_temperature;  // interned strings

// A reference that is given back.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }
  // 1, 0, or −1 with a Python error.
  int truth() const { return object_ ? PyObject_IsTrue(object_) : -1; }

 private:
  PyObject* object_;
};

// ── the conditions ───────────────────────────────────────────────────────────────────────────────────────────────────
// Whether each function of a tuple returns false, for this argument or for none.
bool all_false(PyObject* functions, PyObject* argument) {
  for (Py_ssize_t i = 0, count = PyTuple_Size(functions); i < count; ++i)
    if (Owned(PyObject_CallFunctionObjArgs(PyTuple_GetItem(functions, i), argument, nullptr)).truth()) return false;
  return true;
}

// Whether nothing watches the ops: as `is_plain` of ops/_topk.py, which has the reasons.
bool is_unwatched() {
  if (!all_false(names.watchers, nullptr)) return false;
  const Owned level(PyObject_CallFunctionObjArgs(names.forward_level, names.forward_ad, nullptr));
  return level.get() && PyLong_AsLong(level.get()) < 0 && !PyErr_Occurred();
}

// Describes an ordinary contiguous CPU tensor, and counts its numbers; false for all others. DLPack refuses to describe
// sparse, nested, quantized, meta and wrapped tensors, and those of zeros or functions have no data; what it describes,
// but not by all that makes its values, is among the oddities.
bool describe(PyObject* object, Tensor& t, int64_t& count) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != names.tensor && type != names.parameter) return false;
  if (!all_false(names.oddities, object) || exchange->view(object, &t) || !t.data) return false;
  if (t.device_type != kCpu || t.lanes != 1) return false;
  count = 1;
  for (int32_t d = t.ndim - 1; d >= 0; count *= t.shape[d--])
    if (t.shape[d] != 1 && t.strides && t.strides[d] != count) return false;
  return true;
}

bool is_float(const Tensor& t) { return t.code == kFloating && (t.bits == 32 || t.bits == 64); }

const void* start(const Tensor& t) { return static_cast<const char*>(t.data) + t.byte_offset; }

// Fills in the rows of such a tensor of float or double.
bool view(PyObject* object, Tensor& t, khot_rows& rows) {
  int64_t count;
  if (!describe(object, t, count) || !is_float(t) || t.ndim < 1) return false;
  rows = {};
  rows.x = start(t);
  rows.n = t.shape[t.ndim - 1];
  rows.rows = count ? count / rows.n : 0;
  rows.dtype = t.bits == 32 ? KHOT_FLOAT : KHOT_DOUBLE;
  rows.path = path;
  return count != 0;
}

// Adds a mask: None, one of the shape of the scores, or one for all rows; false for all others.
bool allow(PyObject* object, const Tensor& x, khot_rows& rows) {
  if (object == Py_None) return true;
  Tensor t;
  int64_t count;
  if (!describe(object, t, count) || t.code != kBool || t.bits != 8) return false;
  bool is_alike = t.ndim == x.ndim;
  for (int32_t d = 0; is_alike && d < t.ndim; ++d) is_alike = t.shape[d] == x.shape[d];
  if (!is_alike && !(t.ndim == 1 && t.shape[0] == rows.n)) return false;
  rows.mask = static_cast<const uint8_t*>(start(t));
  rows.mask_stride = 1;
  rows.mask_row_stride = is_alike ? rows.n : 0;
  return true;
}

// Reads an exact int or float; false for all others.
bool number(PyObject* object, double& value) {
  if (PyFloat_CheckExact(object)) value = PyFloat_AsDouble(object);
  else if (PyLong_CheckExact(object)) value = PyLong_AsDouble(object);
  else return false;
  return !PyErr_Occurred();
}

// Reads such a number, or that of an ordinary tensor without dimensions that needs no gradient, as layers have it.
bool number_or_tensor(PyObject* object, double& value) {
  if (number(object, value)) return true;
  Tensor t;
  int64_t count;
  if (PyErr_Occurred() || !describe(object, t, count) || !is_float(t) || t.ndim) return false;
  if (Owned(PyObject_GetAttr(object, requires_grad)).truth()) return false;
  value = t.bits == 32 ? *static_cast<const float*>(start(t)) : *static_cast<const double*>(start(t));
  return true;
}

// The temperature within the normal range of the dtype, as `_shape._positive` has it; false if it is not positive.
bool heat(PyObject* object, khot_rows& rows) {
  double t;
  if (!number_or_tensor(object, t) || !(t > 0)) return false;
  const bool is_float = rows.dtype == KHOT_FLOAT;
  const double least = is_float ? std::numeric_limits<float>::min() : std::numeric_limits<double>::min();
  const double most = is_float ? std::numeric_limits<float>::max() : std::numeric_limits<double>::max();
  rows.temperature_of_all = std::fmin(std::fmax(t, least), most);
  return true;
}

// The number of a cdf in khot.h, and of the threads; false for a cdf that the library has not.
bool finish(PyObject* cdf, khot_rows& rows) {
  const Owned threads(PyObject_CallNoArgs(names.get_num_threads));
  rows.threads = threads.get() ? (int32_t)PyLong_AsLong(threads.get()) : 1;
  for (rows.cdf = 0; rows.cdf < PyTuple_Size(names.cdfs); ++rows.cdf)
    if (PyTuple_GetItem(names.cdfs, rows.cdf) == cdf) return !PyErr_Occurred();
  return false;
}

PyObject* declined() {
  PyErr_Clear();
  Py_RETURN_NONE;
}

// Makes a tensor like another, lets `write` fill it at the address it gets, and returns it.
template <class Write> PyObject* filled(PyObject* like, const khot_rows& rows, Write write) {
  Owned result(PyObject_CallFunctionObjArgs(names.empty_like, like, nullptr));
  Tensor t;
  if (!result.get() || exchange->view(result.get(), &t)) return nullptr;
  char* out = static_cast<char*>(t.data) + t.byte_offset;
  if (rows.rows * rows.n < 8192) {
    write(out);
  } else {
    Py_BEGIN_ALLOW_THREADS;
    write(out);
    Py_END_ALLOW_THREADS;
  }
  return result.release();
}

// ── the functions ────────────────────────────────────────────────────────────────────────────────────────────────────
// topk(x, k, temperature, dim, cdf, mask) → y, with its gradient if x needs one; or None.
PyObject* topk(PyObject*, PyObject* const* given, Py_ssize_t count) {
  Tensor t;
  khot_rows rows;
  double dim;
  if (!exchange || count != 6 || !is_unwatched() || !view(given[0], t, rows) || !number(given[1], rows.k_of_all) ||
      !(rows.k_of_all >= 0 && rows.k_of_all <= (double)rows.n) || !heat(given[2], rows) || !PyLong_CheckExact(given[3]) ||
      !number(given[3], dim) || (dim != -1 && dim != t.ndim - 1) || !allow(given[5], t, rows) || !finish(given[4], rows))
    return declined();
  const int is_enabled = Owned(PyObject_CallNoArgs(names.is_grad_enabled)).truth();
  const int needs = is_enabled == 1 ? Owned(PyObject_GetAttr(given[0], requires_grad)).truth() : is_enabled;
  if (needs < 0) return nullptr;
  Owned y(filled(given[0], rows, [&](void* out) { solve(&rows, out); }));
  if (!needs || !y.get()) return y.release();
  const Owned temperature(PyFloat_FromDouble(rows.temperature_of_all)), solved(PyTuple_Pack(1, y.get()));
  if (!temperature.get() || !solved.get()) return nullptr;
  return PyObject_CallFunctionObjArgs(names.apply, given[0], given[1], temperature.get(), Py_None, given[4],
                                      solved.get(), nullptr);
}

// pull(g, y, temperature, cdf) → the cotangent of x for g, that of y; or None.
PyObject* pull(PyObject*, PyObject* const* given, Py_ssize_t count) {
  Tensor t;
  khot_rows of_g, rows;
  if (!exchange || count != 4 || !is_unwatched() || !view(given[1], t, rows) || !heat(given[2], rows) ||
      !finish(given[3], rows))
    return declined();
  const Owned g(PyObject_CallMethodObjArgs(given[0], contiguous, nullptr));
  if (!g.get() || !view(g.get(), t, of_g) || of_g.dtype != rows.dtype || of_g.n != rows.n || of_g.rows != rows.rows)
    return declined();
  return filled(given[1], rows, [&](void* out) { solve_pull(&rows, of_g.x, out, nullptr); });
}

// What autograd calls of a node of `_TopK`, with the node and g: `backward`, whose usual case needs no Python.
PyObject* of_node(PyObject* node, PyObject* g) {
  const Owned saved(PyObject_GetAttr(node, saved_tensors));  // once: torch.utils.checkpoint refuses a second look
  if (!saved.get()) return nullptr;
  if (Owned(PyObject_CallNoArgs(names.is_grad_enabled)).truth() == 0) {
    if (PyTuple_Size(saved.get()) == 2 && PyTuple_GetItem(saved.get(), 1) == Py_None) {  // y, and a number for T
      const Owned temperature(PyObject_GetAttr(node, of_temperature)), cdf(PyObject_GetAttr(node, of_cdf));
      if (!temperature.get() || !cdf.get()) return nullptr;
      PyObject* const given[] = {g, PyTuple_GetItem(saved.get(), 0), temperature.get(), cdf.get()};
      const Owned dx(pull(nullptr, given, 4));
      if (!dx.get()) return nullptr;
      if (dx.get() != Py_None) return PyTuple_Pack(6, dx.get(), Py_None, Py_None, Py_None, Py_None, Py_None);
    }
  }
  PyErr_Clear();
  return PyObject_CallFunctionObjArgs(names.backward, node, g, saved.get(), nullptr);
}

// method_of(type) → a method of it that is called as of_node(self, g).
PyObject* method_of(PyObject*, PyObject* type) {
  static PyMethodDef definition = {"apply", of_node, METH_O, "apply(g) -> the cotangents of the inputs"};
  if (PyType_Check(type)) return PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type), &definition);
  PyErr_SetString(PyExc_TypeError, "method_of() takes a type");
  return nullptr;
}

// bind(*, topk, topk_pull, path, exchange, and a keyword for each slot): the addresses of the library's functions, DLPack's table,
// and objects.
PyObject* bind(PyObject*, PyObject*, PyObject* keywords) {
  const auto get = [=](const char* name) {
    PyObject* value = keywords ? PyDict_GetItemString(keywords, name) : nullptr;
    if (!value && !PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "bind() lacks `%s`", name);
    return value;
  };
  PyObject *of_topk = get("topk"), *of_pull = get("topk_pull"), *of_path = get("path"), *capsule = get("exchange");
  if (!of_topk || !of_pull || !of_path || !capsule) return nullptr;
  void *topk_at = PyLong_AsVoidPtr(of_topk), *pull_at = PyLong_AsVoidPtr(of_pull);
  const long widest = PyLong_AsLong(of_path);
  auto* table = static_cast<Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (PyErr_Occurred()) return nullptr;
  while (table && table->major > 1) table = table->previous;
  if (!table || table->major != 1 || !table->view) {
    PyErr_SetString(PyExc_ImportError, "torch's DLPack table has no version 1 with views");
    return nullptr;
  }
  for (const Slot& slot : kSlots) {
    PyObject* value = get(slot.name);
    if (!value) return nullptr;
    Py_INCREF(value);
    Py_XDECREF(*slot.place);
    *slot.place = value;
  }
  solve = reinterpret_cast<decltype(solve)>(topk_at);
  solve_pull = reinterpret_cast<decltype(solve_pull)>(pull_at);
  path = (int32_t)widest;
  exchange = table;
  Py_RETURN_NONE;
}

template <class F> PyCFunction method(F f) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f)); }

PyMethodDef methods[] = {{"topk", method(topk), METH_FASTCALL, "topk(x, k, temperature, dim, cdf, mask) -> y or None"},
                         {"pull", method(pull), METH_FASTCALL, "pull(g, y, temperature, cdf) -> dx or None"},
                         {"method_of", method_of, METH_O, "method_of(type) -> what its nodes call"},
                         {"bind", method(bind), METH_VARARGS | METH_KEYWORDS, "Give what the others call."},
                         {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_direct", "Calls without ctypes.", -1, methods, {}, {}, {}, {}};

}  // namespace

PyMODINIT_FUNC PyInit__direct() {
  requires_grad = PyUnicode_InternFromString("requires_grad");
  contiguous = PyUnicode_InternFromString("contiguous");
  saved_tensors = PyUnicode_InternFromString("saved_tensors");
  of_cdf = PyUnicode_InternFromString("cdf");
  of_temperature = PyUnicode_InternFromString("temperature");
  const bool has_names = requires_grad && contiguous && saved_tensors && of_cdf && of_temperature;
  PyObject* made = has_names ? PyModule_Create(&module) : nullptr;
  if (made) PyModule_AddIntConstant(made, "abi", (long)KHOT_ABI);
  return made;
}
