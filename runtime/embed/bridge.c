/* Starts the interpreter. What cffi makes of calls.h is the other part of the bridge. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdio.h>
#include <string.h>

#include "bridge.h"

extern int32_t outrider_py_ready(char *why, size_t size);
extern int32_t outrider_py_stop(void);

static outrider_set_error *tell;

/* What Python calls with an error. */
void outrider_tell(const char *text, size_t length);
void outrider_tell(const char *text, size_t length) { tell(text, length); }

static int start_python(const char *home, char *why, size_t size) {
  char program[4096];
  if ((size_t)snprintf(program, sizeof program, "%s/bin/python3", home) >= sizeof program) return 0;
  PyConfig config;
  PyConfig_InitPythonConfig(&config);
  config.install_signal_handlers = 0; /* they are the application's */
  config.parse_argv = 0;
  config.use_environment = 0; /* PYTHONHOME and the like are for other interpreters */
  config.user_site_directory = 0;
  PyStatus status = PyConfig_SetBytesString(&config, &config.program_name, program);
  if (!PyStatus_Exception(status)) status = Py_InitializeFromConfig(&config);
  PyConfig_Clear(&config);
  if (PyStatus_Exception(status)) {
    snprintf(why, size, "%s", status.err_msg == NULL ? "Python gives no reason" : status.err_msg);
    return 0;
  }
  PyEval_SaveThread();
  return 1;
}

/* What stands in the way of importing `module`, in `why`; 0 where something does. */
static int can_import(const char *module, char *why, size_t size) {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject *found = PyImport_ImportModule(module);
  if (found == NULL) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *text = error == NULL ? NULL : PyObject_Str(error);
    const char *said = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    snprintf(why, size, "%s", said == NULL ? module : said);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    PyErr_Clear();
  }
  Py_XDECREF(found);
  PyGILState_Release(state);
  return found != NULL;
}

__attribute__((visibility("default"))) outrider_bridge_start_function outrider_bridge_start;

int outrider_bridge_start(const char *home, outrider_set_error *set_error, char *why, size_t size) {
  tell = set_error;
  if (!Py_IsInitialized() && !start_python(home, why, size)) return 0;
  /* Asked first: cffi would print what is missing. */
  if (!can_import("_cffi_backend", why, size) || !can_import("runtime.embed.calls", why, size)) return 0;
  snprintf(why, size, "its interpreter does not get as far as Outrider's own code");
  return outrider_py_ready(why, size) == 1;
}

__attribute__((visibility("default"))) outrider_bridge_stop_function outrider_bridge_stop;

void outrider_bridge_stop(void) {
  if (Py_IsInitialized()) outrider_py_stop();
}
