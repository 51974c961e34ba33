/* Starts the interpreter. What cffi makes of calls.h is the other part of the bridge. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdio.h>
#include <string.h>

#include "bridge.h"

extern int32_t outrider_py_ready(char *why, size_t size);
extern int32_t outrider_py_stop(void);

static outrider_set_error *report;

/* What Python calls with an error. */
void outrider_report(const char *text, size_t length);
void outrider_report(const char *text, size_t length) { report(text, length); }

#ifdef OUTRIDER_BUNDLE

/* An interpreter of its own at `home`: it reads no environment, no locale and no folder but `home`/python. */
static PyStatus configure(PyConfig *config, const char *home) {
  PyPreConfig first;
  PyPreConfig_InitIsolatedConfig(&first);
  first.utf8_mode = 1;
  PyStatus status = Py_PreInitialize(&first);
  if (PyStatus_Exception(status)) return status;
  PyConfig_InitIsolatedConfig(config);
  config->site_import = 0;
  config->write_bytecode = 0;
  config->pathconfig_warnings = 0;
  wchar_t **const folders[] = {&config->home,        &config->prefix,      &config->base_prefix,
                               &config->exec_prefix, &config->base_exec_prefix};
  for (size_t i = 0; i < sizeof folders / sizeof *folders; ++i) {
    status = PyConfig_SetBytesString(config, folders[i], home);
    if (PyStatus_Exception(status)) return status;
  }
  char modules[4096];
  snprintf(modules, sizeof modules, "%s/python", home);
  wchar_t *decoded = Py_DecodeLocale(modules, NULL);
  if (decoded == NULL) return PyStatus_NoMemory();
  config->module_search_paths_set = 1;
  status = PyWideStringList_Append(&config->module_search_paths, decoded);
  PyMem_RawFree(decoded);
  return status;
}

#else

/* That of the environment `home`. */
static PyStatus configure(PyConfig *config, const char *home) {
  char program[4096];
  PyConfig_InitPythonConfig(config);
  if ((size_t)snprintf(program, sizeof program, "%s/bin/python3", home) >= sizeof program) {
    return PyStatus_Error("the path of its folder is too long");
  }
  config->parse_argv = 0;
  config->use_environment = 0; /* PYTHONHOME and the like are for other interpreters */
  config->user_site_directory = 0;
  return PyConfig_SetBytesString(config, &config->program_name, program);
}

#endif

static int start_python(const char *home, char *why, size_t size) {
  PyConfig config = {0};
  PyStatus status = configure(&config, home);
  config.install_signal_handlers = 0; /* they are the application's */
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

/* While modules are imported, nothing is garbage. */
static void stop_collecting(void) {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyGC_Disable();
  PyGILState_Release(state);
}

/* Modules stay: the collector need not look at them again. */
static void collect_later_objects(void) {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject *collector = PyImport_ImportModule("gc");
  PyObject *done = collector == NULL ? NULL : PyObject_CallMethod(collector, "freeze", NULL);
  PyErr_Clear();
  Py_XDECREF(done);
  Py_XDECREF(collector);
  PyGC_Enable();
  PyGILState_Release(state);
}

/* cffi's own module is asked for first: cffi would print what is missing. */
static int import_outrider(char *why, size_t size) {
  return can_import("_cffi_backend", why, size) && can_import("outrider.runtime.embed.calls", why, size);
}

__attribute__((visibility("default"))) outrider_bridge_start_function outrider_bridge_start;

int outrider_bridge_start(const char *home, outrider_set_error *set_error, char *why, size_t size) {
  static int ours;
  report = set_error;
  if (!Py_IsInitialized()) {
    if (!start_python(home, why, size)) return 0;
    ours = 1;
  }
#ifdef OUTRIDER_BUNDLE
  if (!ours) {
    snprintf(why, size, "this process runs a Python of its own, and a bundle's cannot run beside it");
    return 0;
  }
#endif
  if (ours) stop_collecting();
  const int imported = import_outrider(why, size);
  if (ours) collect_later_objects();
  if (!imported) return 0;
  snprintf(why, size, "its interpreter does not get as far as Outrider's own code");
  return outrider_py_ready(why, size) == 1;
}

__attribute__((visibility("default"))) outrider_bridge_stop_function outrider_bridge_stop;

void outrider_bridge_stop(void) {
  if (Py_IsInitialized()) outrider_py_stop();
}
