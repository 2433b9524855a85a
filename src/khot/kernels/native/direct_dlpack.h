// Tensors by DLPack's table of C functions, as far as it is read, and by torch's Python functions. Part of direct.cc.
namespace {

struct View {
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
  int (*view)(PyObject* object, View* out);  // non-owning
};
constexpr int32_t kCpu = 1;
constexpr uint8_t kFloating = 2, kBool = 6;
const Exchange* exchange;

// Takes the table from its capsule; false with a Python error.
bool prepare(PyObject* capsule) {
  auto* table = static_cast<Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  while (table && table->major > 1) table = table->previous;
  if (!PyErr_Occurred() && (!table || table->major != 1 || !table->view))
    PyErr_SetString(PyExc_ImportError, "torch's DLPack table has no version 1 with views");
  exchange = table;
  return !PyErr_Occurred();
}

// Whether each function of a tuple returns false, for this argument or for none.
bool all_false(PyObject* functions, PyObject* argument) {
  for (Py_ssize_t i = 0, count = PyTuple_Size(functions); i < count; ++i)
    if (Owned(PyObject_CallFunctionObjArgs(PyTuple_GetItem(functions, i), argument, nullptr)).truth()) return false;
  return true;
}

bool is_unwatched() {
  if (!all_false(names.watchers, nullptr)) return false;
  const Owned level(PyObject_CallFunctionObjArgs(names.forward_level, names.forward_ad, nullptr));
  return level.get() && PyLong_AsLong(level.get()) < 0 && !PyErr_Occurred();
}

// Also true if torch cannot say, with a Python error.
bool is_recording() { return Owned(PyObject_CallNoArgs(names.is_grad_enabled)).truth(); }

int32_t count_threads() {
  const Owned threads(PyObject_CallNoArgs(names.get_num_threads));
  return threads.get() ? (int32_t)PyLong_AsLong(threads.get()) : 1;
}

// Describes an ordinary contiguous CPU tensor; false for all others. DLPack refuses to describe sparse, nested,
// quantized, meta and wrapped tensors, and those of zeros or functions have no data; what it describes, but not by all
// that makes its values, is among the oddities.
bool describe(PyObject* object, Tensor& t) {
  View v;
  if (!is_tensor(object) || !all_false(names.oddities, object) || exchange->view(object, &v) || !v.data) return false;
  if (v.device_type != kCpu || v.lanes != 1) return false;
  t = {static_cast<char*>(v.data) + v.byte_offset, v.ndim, 1, v.shape, Tensor::kOther};
  if (v.code == kFloating && v.bits == 32) t.dtype = Tensor::kFloat;
  if (v.code == kFloating && v.bits == 64) t.dtype = Tensor::kDouble;
  if (v.code == kBool && v.bits == 8) t.dtype = Tensor::kBool;
  for (int32_t d = v.ndim - 1; d >= 0; t.count *= v.shape[d--])
    if (v.shape[d] != 1 && v.strides && v.strides[d] != t.count) return false;
  return true;
}

// Likewise.
bool needs_gradient(PyObject* object) { return Owned(PyObject_GetAttr(object, requires_grad)).truth(); }

template <class Write> PyObject* filled(PyObject* like, const khot_rows& rows, Write write) {
  Owned result(PyObject_CallFunctionObjArgs(names.empty_like, like, nullptr));
  View v;
  if (!result.get() || exchange->view(result.get(), &v)) return nullptr;
  without_python(rows, [&] { write(static_cast<char*>(v.data) + v.byte_offset); });
  return result.release();
}

// Returns y by a node of `_TopK`.
PyObject* solved(PyObject* x, PyObject* k, PyObject* cdf, const khot_rows& rows) {
  const Owned y(filled(x, rows, [&](void* out) { solve(&rows, out); }));
  if (!y.get()) return nullptr;
  const Owned temperature(PyFloat_FromDouble(rows.temperature_of_all)), pack(PyTuple_Pack(1, y.get()));
  if (!temperature.get() || !pack.get()) return nullptr;
  return PyObject_CallFunctionObjArgs(names.apply, x, k, temperature.get(), Py_None, cdf, pack.get(), nullptr);
}

}  // namespace
