/* Outrider: text from a plan, called from C.
 *
 *   outrider_runtime *runtime;
 *   outrider_session *session;
 *   outrider_result *result;
 *   if (outrider_runtime_open(plan, strlen(plan), NULL, 0, &runtime) != OUTRIDER_OK) puts(outrider_last_error());
 *   outrider_session_create(runtime, &session);
 *   outrider_generate(session, prompt, strlen(prompt), NULL, on_span, NULL, &result);
 *
 * Rules for every call:
 *
 * - It returns an outrider_status. Anything but OUTRIDER_OK changed nothing that is not said beside it, left *out
 *   alone, and outrider_last_error() says what, where, and what to do.
 * - Text goes in as bytes of UTF-8 with their length; it need not end with a zero, and may be NULL where the length is
 *   0. Text that comes out has a length too, and a zero behind it that the length does not count.
 * - Handles are owned by the caller, who destroys each once. A handle that is NULL, that was destroyed, or that is of
 *   another kind, gives OUTRIDER_INVALID_HANDLE: it is never followed. Destroying NULL does nothing.
 * - Calls may come from any thread at any time, and what one handle owns may be destroyed while a call with it is under
 *   way: that call then still ends as it would have. Two calls at once on one session give OUTRIDER_BUSY to the second.
 * - The library runs a Python interpreter of its own inside the process, started by the first call that needs it, in the
 *   environment that OUTRIDER_HOME names, or else in the one that it was built for. A process that already runs Python
 *   of the same version shares that. Nothing may be called in a child after fork().
 */
#ifndef OUTRIDER_H
#define OUTRIDER_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define OUTRIDER_API __attribute__((visibility("default")))
#else
#define OUTRIDER_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Changes whenever a program that was compiled against this header has to be compiled again. */
#define OUTRIDER_ABI_VERSION 0

/* What calls return. Numbers never change their meaning; new ones may come. */
typedef int32_t outrider_status;
enum {
  OUTRIDER_OK = 0,
  OUTRIDER_INVALID_HANDLE = 1,   /* NULL, destroyed, or of another kind */
  OUTRIDER_INVALID_ARGUMENT = 2, /* a pointer that must not be NULL, text that is not UTF-8, an unknown key, JSON */
  OUTRIDER_REQUEST = 3,          /* a prompt or an option that cannot be served */
  OUTRIDER_PLAN = 4,             /* the plan is damaged, or cannot run here */
  OUTRIDER_BUSY = 5,             /* the session generates already */
  OUTRIDER_ENVIRONMENT = 6,      /* no Python environment with Outrider in it could be started */
  OUTRIDER_NO_MEMORY = 7,
  OUTRIDER_CALLBACK = 8, /* the callback left with a C++ exception */
  OUTRIDER_INTERNAL = 9  /* a fault of Outrider's own; outrider_last_error() has what to report */
};

/* Why a generation ended. */
enum {
  OUTRIDER_STOPPED = 0,  /* an end token or a stop string */
  OUTRIDER_LENGTH = 1,   /* the limit, or the end of the context */
  OUTRIDER_CANCELLED = 2 /* outrider_session_cancel, or what the callback returned */
};

/* What a callback returns. */
enum { OUTRIDER_CONTINUE = 0, OUTRIDER_STOP = 1 };

typedef struct outrider_runtime outrider_runtime;   /* a loaded plan: weights and tokenizer, shared by its sessions */
typedef struct outrider_session outrider_session;   /* one sequence of tokens */
typedef struct outrider_params outrider_params;     /* options of a generation */
typedef struct outrider_result outrider_result;     /* what a generation gave */
typedef struct outrider_text outrider_text;         /* a text that a call made */
typedef struct outrider_branches outrider_branches; /* what a run of branches gave */

/* OUTRIDER_ABI_VERSION of the library that is running. Needs no Python. */
OUTRIDER_API int32_t outrider_abi_version(void);

/* What went wrong in this thread's last call that did; "" before there was one. Valid until the thread's next call. */
OUTRIDER_API const char *outrider_last_error(void);

/* -- Plans ------------------------------------------------------------------------------------------------------- */

/* What the plan in folder `plan` holds, as JSON, without loading its engines. */
OUTRIDER_API outrider_status outrider_plan_inspect(const char *plan, size_t plan_length, outrider_text **out);

/* Bytes of the text, owned by it. */
OUTRIDER_API outrider_status outrider_text_get(const outrider_text *text, const char **data, size_t *length);
OUTRIDER_API outrider_status outrider_text_destroy(outrider_text *text);

/* Loads the plan in folder `plan`. `options`, a JSON object or nothing: "backend" (its name; default:
 * the best that runs here), "threads" (0: the backend chooses), "verify" (false: skip the files' sha256), "cuda_graphs",
 * "prefix_cache_tokens" (what is kept of all sessions for all sessions, in 1 GiB at most; 0, the default: nothing),
 * "exactness" ("unchecked": run the plan even where drafts and neighbours may change its tokens; default: "probed").
 */
OUTRIDER_API outrider_status outrider_runtime_open(const char *plan, size_t plan_length, const char *options,
                                                   size_t options_length, outrider_runtime **out);

/* Lets go of the plan; its sessions go on, and memory is given back with the last of them. */
OUTRIDER_API outrider_status outrider_runtime_close(outrider_runtime *runtime);

/* -- Sessions ---------------------------------------------------------------------------------------------------- */

/* A new, empty sequence with buffers of its own. */
OUTRIDER_API outrider_status outrider_session_create(outrider_runtime *runtime, outrider_session **out);

/* Empties the sequence. */
OUTRIDER_API outrider_status outrider_session_reset(outrider_session *session);

/* Ends the session's generation at the next token boundary, as OUTRIDER_CANCELLED; does nothing where there is none.
 * The one call that may come while another is under way on the same session, from any thread or from the callback. */
OUTRIDER_API outrider_status outrider_session_cancel(outrider_session *session);

OUTRIDER_API outrider_status outrider_session_destroy(outrider_session *session);

/* -- Options of a generation -------------------------------------------------------------------------------------- */

/* Defaults of everything: greedy, 128 tokens, the plan's first drafter. Options may be used by any number of calls. */
OUTRIDER_API outrider_status outrider_params_create(outrider_params **out);

/* Sets the option `key`. Each has one type:
 *
 *   int     max_new_tokens, top_k, seed, stream_id, min_tokens, partial_budget (blocks; -1: auto), draft_tokens,
 *           draft_depth, gamma_min, gamma_max
 *   double  temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty
 *   bool    ignore_eos, auto_disable, skip_sample_adjustment, remember (0 or 1)
 *   text    drafter ("none" for none), filter_order, partial_kv ("lossless", "lossy", "off"),
 *           logit_bias (a JSON object of numbers from -100 to 100 by token id, such as {"12": -100}),
 *           structured_outputs (the form of the text as a JSON object of one key: "json", a JSON schema; "json_object",
 *           true; "regex"; "grammar", for Lark or llama.cpp; "choice", a list of texts)
 *
 * Values are checked when a generation begins. */
OUTRIDER_API outrider_status outrider_params_set_int(outrider_params *params, const char *key, size_t key_length,
                                                     int64_t value);
/* The same for a seed of 2**63 or more. */
OUTRIDER_API outrider_status outrider_params_set_uint(outrider_params *params, const char *key, size_t key_length,
                                                      uint64_t value);
OUTRIDER_API outrider_status outrider_params_set_double(outrider_params *params, const char *key, size_t key_length,
                                                        double value);
OUTRIDER_API outrider_status outrider_params_set_bool(outrider_params *params, const char *key, size_t key_length,
                                                      int32_t value);
OUTRIDER_API outrider_status outrider_params_set_text(outrider_params *params, const char *key, size_t key_length,
                                                      const char *value, size_t value_length);
/* Adds to a list: "stop", texts before which a generation ends, at most 16 of at most 1,000 bytes; "bad_words", texts
 * that are not generated. */
OUTRIDER_API outrider_status outrider_params_add_text(outrider_params *params, const char *key, size_t key_length,
                                                      const char *value, size_t value_length);
/* Adds to a list: "eos_token_ids", tokens that end a generation, in place of the plan's own; "allowed_token_ids", the
 * only tokens that may come. */
OUTRIDER_API outrider_status outrider_params_add_int(outrider_params *params, const char *key, size_t key_length,
                                                     int64_t value);
OUTRIDER_API outrider_status outrider_params_destroy(outrider_params *params);

/* -- Generating --------------------------------------------------------------------------------------------------- */

/* Gets what a step committed: `count` tokens, more than one where a draft was accepted, and the text that is certain now,
 * which may be less or more than those tokens'. `tokens` and `text` are good until it returns. It runs in the thread
 * that called, and may call anything but what needs the session for itself. Returns OUTRIDER_CONTINUE or OUTRIDER_STOP;
 * any other number stops too. It must return: a C++ exception is caught and gives OUTRIDER_CALLBACK, with what was
 * committed before it still in the session; longjmp and the thread's cancellation are not. */
typedef int32_t (*outrider_on_span)(void *user, const int64_t *tokens, size_t count, const char *text, size_t length);

/* Appends `prompt` to the session's sequence and generates. `params` may be NULL for defaults, `on_span` NULL for none;
 * `user` is passed on to it. Blocks until the generation has ended; *out then has all of it. A generation that was
 * cancelled or stopped is OUTRIDER_OK too. After an error the sequence is what it was, as far as it had not begun. */
OUTRIDER_API outrider_status outrider_generate(outrider_session *session, const char *prompt, size_t prompt_length,
                                               const outrider_params *params, outrider_on_span on_span, void *user,
                                               outrider_result **out);

/* The same from `count` token ids. */
OUTRIDER_API outrider_status outrider_generate_tokens(outrider_session *session, const int64_t *prompt, size_t count,
                                                      const outrider_params *params, outrider_on_span on_span,
                                                      void *user, outrider_result **out);

/* What the result holds; pointers are good until it is destroyed. The generated tokens, an end token included. */
OUTRIDER_API outrider_status outrider_result_tokens(const outrider_result *result, const int64_t **tokens,
                                                    size_t *count);
/* Their text, without end token and stop string. */
OUTRIDER_API outrider_status outrider_result_text(const outrider_result *result, const char **data, size_t *length);
/* OUTRIDER_STOPPED, OUTRIDER_LENGTH or OUTRIDER_CANCELLED. */
OUTRIDER_API outrider_status outrider_result_finish_reason(const outrider_result *result, int32_t *reason);
/* Counts and times, as a JSON object: "new_tokens", "ttft_ms", "decode_tokens_per_second", "tokens_per_verify" ... */
OUTRIDER_API outrider_status outrider_result_stats(const outrider_result *result, const char **data, size_t *length);
OUTRIDER_API outrider_status outrider_result_destroy(outrider_result *result);

/* -- Branches ----------------------------------------------------------------------------------------------------- */

/* As outrider_on_span, for the branch of that number, counted from 0 in the order asked for. Returning OUTRIDER_STOP ends
 * that branch alone, and of samples asked for by "n" all of them. A C++ exception ends the run: nothing is kept. */
typedef int32_t (*outrider_on_branch)(void *user, size_t branch, const int64_t *tokens, size_t count, const char *text,
                                      size_t length);

/* Continues a prompt in several branches at once, each with the tokens that it would have alone. `request` is a JSON
 * object: "prompt", a text or a list of token ids; "branches", a list of what each begins with behind it: a text, token
 * ids, or an object of "prompt", "predicted_tokens" and options of its own (those of outrider_params, what is added to
 * being a list, "logit_bias" and "structured_outputs" objects); or in place of that "n", so many samples of the prompt;
 * "mode", "in-one-sequence" or "batching"; "max_parallel". `params` holds for all branches; it and `on_branch` may be
 * NULL. Needs a plan of several branches. Blocks until all have ended; to end it from another thread, have `on_branch`
 * return what that thread wrote down. Runs of one runtime may be under way in several threads. */
OUTRIDER_API outrider_status outrider_generate_branches(outrider_runtime *runtime, const char *request,
                                                        size_t request_length, const outrider_params *params,
                                                        outrider_on_branch on_branch, void *user,
                                                        outrider_branches **out);

/* How many branches there were. */
OUTRIDER_API outrider_status outrider_branches_count(const outrider_branches *branches, size_t *count);
/* What the branch of that number gave: a result of its own, which the caller destroys. */
OUTRIDER_API outrider_status outrider_branches_result(const outrider_branches *branches, size_t branch,
                                                      outrider_result **out);
/* What the run cost, as a JSON object: "rounds", "new_tokens", "tokens_per_second", "kv_bytes", "bytes_copied" ... */
OUTRIDER_API outrider_status outrider_branches_stats(const outrider_branches *branches, const char **data,
                                                     size_t *length);
OUTRIDER_API outrider_status outrider_branches_destroy(outrider_branches *branches);

#ifdef __cplusplus
}
#endif

#endif /* OUTRIDER_H */
