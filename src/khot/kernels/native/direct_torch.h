// Tensors by torch's C++ headers, and a node of C++. Part of direct.cc, for the version of torch that it was built with.
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/Exceptions.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

uint64_t plain_keys, inference_keys;  // what the dispatcher looks at in ordinary tensors

bool prepare(PyObject*) {
  plain_keys = at::empty({0}).key_set().raw_repr();
  const c10::InferenceMode guard;
  inference_keys = at::empty({0}).key_set().raw_repr();
  return true;
}

bool is_unwatched() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return !included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
         !included.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode) && !at::tracer::impl::is_dispatch_enabled() &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set() && !at::impl::PythonTorchFunctionTLS::stack_len() &&
         !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

bool is_recording() { return at::GradMode::is_enabled(); }

int32_t count_threads() { return at::get_num_threads(); }

// Describes an ordinary contiguous CPU tensor; false for all others.
bool describe(const at::Tensor& v, Tensor& t) {
  if (!v.defined()) return false;
  const uint64_t keys = v.key_set().raw_repr();
  if ((keys != plain_keys && keys != inference_keys) || !v.is_contiguous()) return false;
  t = {const_cast<void*>(v.const_data_ptr()), v.dim(), v.numel(), v.sizes().data(), Tensor::kOther};
  if (v.scalar_type() == at::kFloat) t.dtype = Tensor::kFloat;
  if (v.scalar_type() == at::kDouble) t.dtype = Tensor::kDouble;
  if (v.scalar_type() == at::kBool) t.dtype = Tensor::kBool;
  return true;
}

bool describe(PyObject* object, Tensor& t) { return is_tensor(object) && describe(THPVariable_Unpack(object), t); }

bool needs_gradient(PyObject* object) { return THPVariable_Unpack(object).requires_grad(); }

template <class Write> PyObject* filled(PyObject* like, const khot_rows& rows, Write write) {
  HANDLE_TH_ERRORS
  at::Tensor result = at::empty_like(THPVariable_Unpack(like));
  without_python(rows, [&] { write(result.mutable_data_ptr()); });
  return THPVariable_Wrap(result);
  END_HANDLE_TH_ERRORS
}

// A node that saves y, which autograd tracks; torch prints the name of the struct. What is not simple in backward goes to
// `_pull_value` of ops/_topk.py.
struct TopKBackward : torch::autograd::Function<TopKBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* node, const at::Tensor& x, const khot_rows* rows) {
    at::Tensor y = at::empty_like(x);
    without_python(*rows, [&] { solve(rows, y.mutable_data_ptr()); });
    node->save_for_backward({y});
    node->saved_data["temperature"] = rows->temperature_of_all;
    node->saved_data["cdf"] = (int64_t)rows->cdf;
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* node,
                                                 torch::autograd::variable_list gs) {
    const at::Tensor y = node->get_saved_variables()[0];
    const double temperature = node->saved_data["temperature"].toDouble();
    const int64_t cdf = node->saved_data["cdf"].toInt();
    Tensor t;
    khot_rows of_g, rows;
    if (!is_recording() && is_unwatched() && describe(y, t) && fill(t, rows) && gs[0].layout() == at::kStrided) {
      const at::Tensor g = gs[0].contiguous();
      if (describe(g, t) && fill(t, of_g) && of_g.dtype == rows.dtype && g.sizes() == y.sizes()) {
        rows.temperature_of_all = temperature;
        rows.cdf = (int32_t)cdf;
        rows.threads = count_threads();
        at::Tensor dx = at::empty_like(y);
        solve_pull(&rows, of_g.x, dx.mutable_data_ptr(), nullptr);
        return {dx, at::Tensor()};
      }
    }
    const pybind11::gil_scoped_acquire gil;
    const Owned of_y(THPVariable_Wrap(y)), g(THPVariable_Wrap(gs[0])), heat(PyFloat_FromDouble(temperature));
    const Owned dx(PyObject_CallFunctionObjArgs(names.pull, g.get(), of_y.get(), heat.get(),
                                                PyTuple_GetItem(names.cdfs, cdf), nullptr));
    if (!dx.get()) {
      python_error error;
      error.persist();
      throw error;
    }
    return {THPVariable_Unpack(dx.get()), at::Tensor()};
  }
};

PyObject* solved(PyObject* x, PyObject*, PyObject*, const khot_rows& rows) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(TopKBackward::apply(THPVariable_Unpack(x), &rows));
  END_HANDLE_TH_ERRORS
}

}  // namespace
