/* What the library asks of the Python side, by numbers, addresses and the structs of outrider.h. cffi reads this file.
 *
 * A handle is a number above 0; 0 stands for NULL. A prompt is a struct of bridge.h. Every call returns an
 * outrider_status.
 */
int32_t outrider_py_inspect(const char *plan, size_t plan_length, uint64_t *out);
int32_t outrider_py_open(const char *plan, size_t plan_length, const char *options, size_t options_length,
                         uint64_t *out);
int32_t outrider_py_drain(uint64_t runtime, int64_t timeout_ms);
int32_t outrider_py_runtime_stats(uint64_t runtime, uint64_t *out);
int32_t outrider_py_count_tokens(uint64_t runtime, const outrider_prompt *prompt, uint64_t params, size_t *count);
int32_t outrider_py_save_cache(uint64_t runtime, const char *path, size_t path_length, size_t *tokens);
int32_t outrider_py_load_cache(uint64_t runtime, const char *path, size_t path_length, size_t *tokens);
int32_t outrider_py_session(uint64_t runtime, uint64_t *out);
int32_t outrider_py_reset(uint64_t session);
int32_t outrider_py_cancel(uint64_t session);
int32_t outrider_py_params(uint64_t *out);
int32_t outrider_py_set_int(uint64_t params, const char *key, size_t key_length, int64_t value);
int32_t outrider_py_set_uint(uint64_t params, const char *key, size_t key_length, uint64_t value);
int32_t outrider_py_set_double(uint64_t params, const char *key, size_t key_length, double value);
int32_t outrider_py_set_bool(uint64_t params, const char *key, size_t key_length, int32_t value);
int32_t outrider_py_set_text(uint64_t params, const char *key, size_t key_length, const char *value,
                             size_t value_length);
int32_t outrider_py_add_text(uint64_t params, const char *key, size_t key_length, const char *value,
                             size_t value_length);
int32_t outrider_py_add_ints(uint64_t params, const char *key, size_t key_length, const int64_t *values, size_t count);
int32_t outrider_py_add_function(uint64_t params,
                                 int32_t (*call)(void (*)(void), void *, const int64_t *, size_t, float *, size_t,
                                                 char *, size_t),
                                 void (*function)(void), void *user);
int32_t outrider_py_generate(uint64_t session, const outrider_prompt *prompt, uint64_t params,
                             int32_t (*on_span)(void *, const int64_t *, size_t, const char *, size_t), void *user,
                             uint64_t *out);
int32_t outrider_py_text(uint64_t text, const char **data, size_t *length);
int32_t outrider_py_tokens(uint64_t result, const int64_t **tokens, size_t *count);
int32_t outrider_py_result_text(uint64_t result, const char **data, size_t *length);
int32_t outrider_py_finish_reason(uint64_t result, int32_t *reason);
int32_t outrider_py_seed(uint64_t result, uint64_t *seed);
int32_t outrider_py_logprobs(uint64_t result, const outrider_logprobs **out);
int32_t outrider_py_stats(uint64_t result, const char **data, size_t *length);
int32_t outrider_py_submit(uint64_t runtime, const outrider_prompt *prompt, uint64_t params,
                           int32_t (*call)(void (*)(void), void *, uint64_t, char *, size_t), void (*function)(void),
                           void *user, uint64_t *out);
int32_t outrider_py_next(uint64_t request, int64_t timeout_ms, const outrider_span **span);
int32_t outrider_py_request_result(uint64_t request, int64_t timeout_ms, uint64_t *out);
int32_t outrider_py_cancel_request(uint64_t request);
int32_t outrider_py_branches(uint64_t runtime, const char *request, size_t request_length, uint64_t params,
                             int32_t (*on_branch)(void *, size_t, const int64_t *, size_t, const char *, size_t),
                             void *user, uint64_t *out);
int32_t outrider_py_branch_count(uint64_t branches, size_t *count);
int32_t outrider_py_branch_result(uint64_t branches, size_t index, uint64_t *out);
int32_t outrider_py_branches_stats(uint64_t branches, const char **data, size_t *length);
int32_t outrider_py_stop(void);
int32_t outrider_py_destroy(uint64_t handle, int32_t kind);
