#include "echo/runtime_config.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <string_view>
#include <vector>

#include "bindings.hpp"
#include "echo/errors.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace echo::python {
namespace {

nb::object value_of(const RuntimeConfig& config, const ConfigField& field) {
  return std::visit([&](auto member) { return nb::cast(config.*member); }, field.member);
}

const ConfigField& field_named(const std::string& name) {
  nb::list names;
  for (const ConfigField& field : config_fields()) {
    if (field.name == name) {
      return field;
    }
    names.append(field.name);
  }
  const nb::object near = nb::module_::import_("difflib").attr("get_close_matches")(name, names, 1);
  throw InvalidArgument(name + ": no such setting of the runtime" +
                        (nb::len(near) > 0 ? "; did you mean " + nb::cast<std::string>(near[0]) + "?" : ""));
}

/// Assigns a Python value; bool is no number here, and no number is silently rounded.
void assign(RuntimeConfig& config, const std::string& name, nb::handle value) {
  const ConfigField& field = field_named(name);
  const auto refuse = [&](std::string_view expected) {
    throw InvalidArgument(name + ": " + std::string(nb::repr(value).c_str()) + " given, expected " +
                          std::string(expected));
  };
  const bool is_bool = nb::isinstance<nb::bool_>(value);
  if (const auto* text = std::get_if<std::string RuntimeConfig::*>(&field.member)) {
    if (!nb::isinstance<nb::str>(value) || !nb::try_cast<std::string>(value, config.*(*text))) {
      refuse(field.choices);
    }
  } else if (const auto* integer = std::get_if<std::int64_t RuntimeConfig::*>(&field.member)) {
    if (is_bool || !nb::try_cast<std::int64_t>(value, config.*(*integer))) {
      refuse("an integer");
    }
  } else if (is_bool || !nb::try_cast<double>(value, config.*std::get<double RuntimeConfig::*>(field.member))) {
    refuse("a number");
  }
}

}  // namespace

void register_runtime_config(nb::module_& module) {
  nb::class_<ConfigField>(module, "ConfigField", "One setting of a runtime: its name, unit, and what it means.")
      .def_ro("name", &ConfigField::name)
      .def_ro("unit", &ConfigField::unit)
      .def_ro("doc", &ConfigField::doc)
      .def_ro("choices", &ConfigField::choices, "Of text, as messages list them; empty for numbers.")
      .def_prop_ro(
          "default", [](const ConfigField& field) { return value_of(RuntimeConfig{}, field); },
          nb::sig("def default(self) -> str | int | float"))
      .def_prop_ro(
          "type",
          [](const ConfigField& field) { return nb::borrow(nb::handle(value_of(RuntimeConfig{}, field).type())); },
          nb::sig("def type(self) -> type[str] | type[int] | type[float]"));
  module.def(
      "config_fields", [] { return std::vector<ConfigField>(config_fields().begin(), config_fields().end()); },
      "All settings of a runtime, in order.");
  nb::class_<RuntimeConfig>(module, "RuntimeConfig",
                            "Settings of a runtime. Each can be given as a keyword, else as the environment variable\n"
                            "ECHO_<NAME>, else it has its default; `config_fields()` documents them.\n\n"
                            "Raises:\n    InvalidArgument: naming the setting or the variable.")
      .def(
          "__init__",
          [](RuntimeConfig* self, nb::kwargs settings) {
            RuntimeConfig config = RuntimeConfig::from_env();
            for (const auto& [name, value] : settings) {
              assign(config, nb::cast<std::string>(name), value);
            }
            new (self) RuntimeConfig(std::move(config));
          },
          nb::sig("def __init__(self, **settings: str | int | float) -> None"))
      .def(
          "__getattr__",
          [](const RuntimeConfig& config, const std::string& name) {
            for (const ConfigField& field : config_fields()) {
              if (field.name == name) {
                return value_of(config, field);
              }
            }
            throw nb::attribute_error(name.c_str());
          },
          "name"_a, nb::sig("def __getattr__(self, name: str) -> typing.Any"))
      .def("__repr__", [](const RuntimeConfig& config) {
        std::string text = "RuntimeConfig(";
        for (const ConfigField& field : config_fields()) {
          text += (text.back() == '(' ? "" : ", ") + std::string(field.name) + "=" +
                  std::string(nb::repr(value_of(config, field)).c_str());
        }
        return text + ")";
      });
}

}  // namespace echo::python
