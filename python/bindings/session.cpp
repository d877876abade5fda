#include "echo/session.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>

#include "bindings.hpp"
#include "integers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace echo::python {
namespace {

Session fork(const Session& self, const Integer<std::int64_t>& max_tokens) {
  const std::int64_t most = integer("max_tokens", max_tokens);
  const nb::gil_scoped_release release;
  return self.fork(most);
}

void truncate(Session& self, const Integer<std::int64_t>& length) {
  const std::int64_t kept = integer("length", length);
  const nb::gil_scoped_release release;
  self.truncate(kept);
}

}  // namespace

void register_session(nb::module_& module) {
  nb::class_<Session>(module, "Session",
                      "One request's context. Made by Runtime.open_session; usable as a context manager.")
      .def_prop_ro("id", &Session::id, "Unique over the life of the runtime.")
      .def_prop_ro("length", &Session::length, "Tokens in the context so far.")
      .def_prop_ro("capacity", &Session::capacity, "Most tokens it can hold: prompt and output.")
      .def_prop_ro("closed", &Session::closed)
      .def_prop_ro("blocks", &Session::blocks, "Host blocks: the row of position p is blocks[p // 64] * 64 + p % 64.")
      .def_prop_ro("paused", &Session::paused)
      .def("fork", &fork, "max_tokens"_a = 0,
           "A new session with the same context and its own future.\n\n"
           "Whole blocks of 64 tokens are shared, the last one is copied.\n\n"
           "Args:\n    max_tokens: most tokens the new session can hold; 0 means as many as this one.\n\n"
           "Raises:\n    CapacityError: no session or not enough host rows are free.")
      .def("truncate", &truncate, "length"_a,
           "Forgets all tokens from `length` on (rejected speculation, an edited prompt).\n\n"
           "Raises:\n    InvalidArgument: length is not 0 to the session's length.\n"
           "    CapacityError: a fork, or an export of one, shares blocks from there on, and there are none to replace "
           "them by.")
      .def("pause", &Session::pause, nb::call_guard<nb::gil_scoped_release>(),
           "Gives up the session's GPU rows. It keeps its host rows; it cannot be decoded until `resume`.")
      .def("resume", &Session::resume, nb::call_guard<nb::gil_scoped_release>(),
           "Ends a pause; rows come back as they are selected, with the same bits.")
      .def("close", &Session::close, nb::call_guard<nb::gil_scoped_release>(),
           "Gives back all host rows and GPU slots. Idempotent.")
      .def("__enter__", [](const Session& session) { return session; })
      .def(
          "__exit__", [](Session& session, nb::handle, nb::handle, nb::handle) { session.close(); },
          "exception_type"_a.none(), "exception"_a.none(), "traceback"_a.none())
      .def(
          "__eq__",
          [](const Session& a, nb::handle b) { return nb::isinstance<Session>(b) && nb::cast<const Session&>(b) == a; },
          nb::arg().none())
      .def("__hash__", &Session::id)
      .def("__repr__", [](const Session& s) {
        return "<Session " + std::to_string(s.id()) + ", " + std::to_string(s.length()) + " of " +
               std::to_string(s.capacity()) + " tokens" +
               (s.closed()   ? ", closed>"
                : s.paused() ? ", paused>"
                             : ">");
      });
}

}  // namespace echo::python
