// The one place where C++ errors become Python errors, under the same names.

#include "echo/errors.hpp"

#include <initializer_list>
#include <iterator>
#include <string_view>

#include "bindings.hpp"

namespace nb = nanobind;

namespace echo::python {
namespace {

// The classes live as long as the interpreter: a translator cannot know when the module goes.
struct ErrorClasses {
  PyObject* error;
  PyObject* invalid_argument;
  PyObject* capacity;
  PyObject* state;
  PyObject* cuda;
  PyObject* not_supported;
};

PyObject* make_class(nb::module_& module, const char* name, const char* doc, std::initializer_list<PyObject*> bases) {
  nb::list base_list;
  for (PyObject* base : bases) {
    base_list.append(nb::handle(base));
  }
  const nb::object base_tuple = nb::tuple(base_list);
  const std::string qualified = std::string("echo._core.") + name;
  PyObject* made = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, base_tuple.ptr(), nullptr);
  if (made == nullptr) {
    throw nb::python_error();
  }
  module.attr(name) = nb::handle(made);
  return made;
}

/// A message may quote a variable of the environment, which need not be UTF-8.
void set_error(PyObject* type, const char* message) {
  const auto text = nb::steal(PyUnicode_DecodeUTF8(message, std::ssize(std::string_view(message)), "backslashreplace"));
  if (text.is_valid()) {
    PyErr_SetObject(type, text.ptr());
  }
}

void translate(const std::exception_ptr& thrown, void* payload) {
  const auto& classes = *static_cast<const ErrorClasses*>(payload);
  try {
    std::rethrow_exception(thrown);
  } catch (const InvalidArgument& e) {
    set_error(classes.invalid_argument, e.what());
  } catch (const CapacityError& e) {
    set_error(classes.capacity, e.what());
  } catch (const StateError& e) {
    set_error(classes.state, e.what());
  } catch (const CudaError& e) {
    set_error(classes.cuda, e.what());
  } catch (const NotSupported& e) {
    set_error(classes.not_supported, e.what());
  } catch (const Error& e) {
    set_error(classes.error, e.what());
  }
}

}  // namespace

void register_errors(nb::module_& module) {
  static ErrorClasses classes;
  classes.error = make_class(module, "Error", "Root of everything echo raises.", {PyExc_Exception});
  classes.invalid_argument =
      make_class(module, "InvalidArgument", "An argument is malformed; the message begins with its name.",
                 {classes.error, PyExc_ValueError});
  classes.capacity =
      make_class(module, "CapacityError", "It does not fit; nothing has changed.", {classes.error, PyExc_MemoryError});
  classes.state =
      make_class(module, "StateError", "The object is in no state for this call.", {classes.error, PyExc_RuntimeError});
  classes.cuda = make_class(module, "CudaError", "A CUDA call failed. The runtime can only be closed afterwards.",
                            {classes.error, PyExc_RuntimeError});
  classes.not_supported = make_class(module, "NotSupported", "This build or device cannot do it.",
                                     {classes.error, PyExc_NotImplementedError});
  nb::register_exception_translator(translate, &classes);
}

}  // namespace echo::python
