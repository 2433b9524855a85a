// The calls of a training step, from Python to the library without ctypes.
//
// This file is built once or twice. khot.kernels._direct keeps to the stable ABI of Python 3.11 and reads tensors through
// DLPack's table of C functions (direct_dlpack.h), so that one build serves every later Python and every torch that has
// the table. Where the build finds torch's headers, khot.kernels._direct_torch reads tensors through them and puts a node
// of C++ into the graph (direct_torch.h); it serves that version of torch alone. Both have the conditions and the
// functions below, and decline what is not simple by returning None; ops/_topk.py then takes the general way, with its
// checks.
#ifdef KHOT_TORCH
#define KHOT_NAME "_direct_torch"
#define KHOT_INIT PyInit__direct_torch
#else
#define KHOT_NAME "_direct"
#define KHOT_INIT PyInit__direct
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "khot.h"

namespace {

// ── what `bind` was given ────────────────────────────────────────────────────────────────────────────────────────────
void (*solve)(const khot_rows* rows, void* y);
void (*solve_pull)(const khot_rows* rows, const void* g, void* dx, double* dk);
int32_t path = -1;  // until `bind` was called
// Functions and types of torch, and what ops/_topk.py has.
struct Names {
  PyObject *tensor, *parameter, *empty_like, *get_num_threads, *is_grad_enabled, *watchers, *forward_level, *forward_ad,
      *oddities, *cdfs, *apply, *backward, *pull;
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
                       {"backward", &names.backward},
                       {"pull", &names.pull}};
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

// Calls `write`, which needs no Python, and lets other threads of Python run if that takes long.
template <class Write> void without_python(const khot_rows& rows, Write write) {
  if (rows.rows * rows.n < 8192) {
    write();
  } else {
    Py_BEGIN_ALLOW_THREADS;
    write();
    Py_END_ALLOW_THREADS;
  }
}

// What is read of an ordinary contiguous CPU tensor.
struct Tensor {
  void* data;
  int64_t ndim, count;
  const int64_t* shape;
  enum { kFloat, kDouble, kBool, kOther } dtype;
  bool is_float() const { return dtype == kFloat || dtype == kDouble; }
};

bool is_tensor(PyObject* object) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == names.tensor || type == names.parameter;
}

// Fills in the rows of such a tensor of float or double; false for other dtypes, no dimension or no numbers.
bool fill(const Tensor& t, khot_rows& rows) {
  if (!t.is_float() || t.ndim < 1 || !t.count) return false;
  rows = {};
  rows.x = t.data;
  rows.n = t.shape[t.ndim - 1];
  rows.rows = t.count / rows.n;
  rows.dtype = t.dtype == Tensor::kFloat ? KHOT_FLOAT : KHOT_DOUBLE;
  rows.path = path;
  return true;
}

}  // namespace

// Each defines: prepare(exchange); is_unwatched(), as `is_plain` of ops/_topk.py, which has the reasons; is_recording(),
// whether gradients are on, and count_threads(); describe(object, tensor) and needs_gradient(object); filled(like, rows,
// write), which makes a tensor and lets `write` fill it at the address it gets; and solved(x, k, cdf, rows), which
// returns y with a gradient.
#ifdef KHOT_TORCH
#include "direct_torch.h"
#else
#include "direct_dlpack.h"
#endif

namespace {

// ── the conditions ───────────────────────────────────────────────────────────────────────────────────────────────────
bool view(PyObject* object, Tensor& t, khot_rows& rows) { return describe(object, t) && fill(t, rows); }

// Adds a mask: None, one of the shape of the scores, or one for all rows; false for all others.
bool allow(PyObject* object, const Tensor& x, khot_rows& rows) {
  if (object == Py_None) return true;
  Tensor t;
  if (!describe(object, t) || t.dtype != Tensor::kBool) return false;
  bool is_alike = t.ndim == x.ndim;
  for (int64_t d = 0; is_alike && d < t.ndim; ++d) is_alike = t.shape[d] == x.shape[d];
  if (!is_alike && !(t.ndim == 1 && t.shape[0] == rows.n)) return false;
  rows.mask = static_cast<const uint8_t*>(t.data);
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
  if (PyErr_Occurred() || !describe(object, t) || !t.is_float() || t.ndim || needs_gradient(object)) return false;
  value = t.dtype == Tensor::kFloat ? *static_cast<const float*>(t.data) : *static_cast<const double*>(t.data);
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
  rows.threads = count_threads();
  for (rows.cdf = 0; rows.cdf < PyTuple_Size(names.cdfs); ++rows.cdf)
    if (PyTuple_GetItem(names.cdfs, rows.cdf) == cdf) return !PyErr_Occurred();
  return false;
}

PyObject* declined() {
  PyErr_Clear();
  Py_RETURN_NONE;
}

// ── the functions ────────────────────────────────────────────────────────────────────────────────────────────────────
// topk(x, k, temperature, dim, cdf, mask) → y, with its gradient if x needs one; or None.
PyObject* topk(PyObject*, PyObject* const* given, Py_ssize_t count) {
  Tensor t;
  khot_rows rows;
  double dim;
  if (path < 0 || count != 6 || !is_unwatched() || !view(given[0], t, rows) || !number(given[1], rows.k_of_all) ||
      !(rows.k_of_all >= 0 && rows.k_of_all <= (double)rows.n) || !heat(given[2], rows) || !PyLong_CheckExact(given[3]) ||
      !number(given[3], dim) || (dim != -1 && dim != t.ndim - 1) || !allow(given[5], t, rows) || !finish(given[4], rows))
    return declined();
  const bool needs = is_recording() && needs_gradient(given[0]);
  if (PyErr_Occurred()) return nullptr;
  return needs ? solved(given[0], given[1], given[4], rows) : filled(given[0], rows, [&](void* out) { solve(&rows, out); });
}

// pull(g, y, temperature, cdf) → the cotangent of x for g, that of y; or None.
PyObject* pull(PyObject*, PyObject* const* given, Py_ssize_t count) {
  Tensor t;
  khot_rows of_g, rows;
  if (path < 0 || count != 4 || !is_unwatched() || !view(given[1], t, rows) || !heat(given[2], rows) ||
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
  if (!is_recording()) {
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

// bind(*, topk, topk_pull, path, exchange, and a keyword for each slot): the addresses of the library's functions, the
// widest path, DLPack's table or None, and objects.
PyObject* bind(PyObject*, PyObject*, PyObject* keywords) {
  const auto get = [=](const char* name) {
    PyObject* value = keywords ? PyDict_GetItemString(keywords, name) : nullptr;
    if (!value && !PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "bind() lacks `%s`", name);
    return value;
  };
  PyObject *of_topk = get("topk"), *of_pull = get("topk_pull"), *of_path = get("path"), *table = get("exchange");
  if (!of_topk || !of_pull || !of_path || !table) return nullptr;
  void *topk_at = PyLong_AsVoidPtr(of_topk), *pull_at = PyLong_AsVoidPtr(of_pull);
  const long widest = PyLong_AsLong(of_path);
  if (PyErr_Occurred() || !prepare(table)) return nullptr;
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
  Py_RETURN_NONE;
}

template <class F> PyCFunction method(F f) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f)); }

PyMethodDef methods[] = {{"topk", method(topk), METH_FASTCALL, "topk(x, k, temperature, dim, cdf, mask) -> y or None"},
                         {"pull", method(pull), METH_FASTCALL, "pull(g, y, temperature, cdf) -> dx or None"},
                         {"method_of", method_of, METH_O, "method_of(type) -> what its nodes call"},
                         {"bind", method(bind), METH_VARARGS | METH_KEYWORDS, "Give what the others call."},
                         {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, KHOT_NAME, "Calls without ctypes.", -1, methods, {}, {}, {}, {}};

}  // namespace

PyMODINIT_FUNC KHOT_INIT() {
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
