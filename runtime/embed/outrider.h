/* Outrider: text from a plan, called from C.
 *
 *   outrider_runtime *runtime;
 *   outrider_session *session;
 *   outrider_result *result;
 *   if (outrider_runtime_open(plan, strlen(plan), NULL, 0, &runtime) != OUTRIDER_OK) puts(outrider_last_error());
 *   outrider_session_create(runtime, &session);
 *   outrider_generate(session, prompt, strlen(prompt), NULL, on_span, NULL, &result);
 *
 * A session generates in the thread that calls. outrider_submit has a request served beside others, in threads of the
 * library's own: prompts are computed and tokens decoded in shared passes, and the caller asks for what has come.
 *
 * Rules for every call:
 *
 * - It returns an outrider_status. Anything but OUTRIDER_OK changed nothing that is not said beside it, left *out
 *   alone, and outrider_last_error() says what, where, and what to do.
 * - Text goes in as bytes of UTF-8 with their length; it need not end with a zero, and may be NULL where the length is
 *   0. Text that comes out has a length too, and a zero after it that the length does not count.
 * - Handles are owned by the caller, who destroys each once. A handle that is NULL, that was destroyed, or that is of
 *   another kind, gives OUTRIDER_INVALID_HANDLE: it is never followed. Destroying NULL does nothing.
 * - Calls may come from any thread at any time, and what one handle owns may be destroyed while a call with it is under
 *   way: that call then still ends as it would have (outrider_request_next, with OUTRIDER_INVALID_HANDLE). Two calls at
 *   once on one session give OUTRIDER_BUSY to the second.
 * - Structs are made by the library. A later version may add fields after the last one.
 * - The library runs a Python interpreter of its own inside the process, started by the first call that needs it, in
 *   the environment that OUTRIDER_HOME names, or else in the one that it was built for. A process that already runs
 *   Python of the same version shares that. Threads that call have stacks of 256 KiB or more. Nothing may be called in
 *   a child after fork(). Where the process ends, by exit() or by returning from main, what generates is cancelled, and
 *   the process waits for the pass that runs.
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
  OUTRIDER_CALLBACK = 8, /* a callback left with a C++ exception, or gave up */
  OUTRIDER_INTERNAL = 9, /* a fault of Outrider's own; outrider_last_error() has what to report */
  OUTRIDER_TIMEOUT = 10, /* the time has passed, and there is nothing yet: call again */
  OUTRIDER_CLOSED = 11,  /* the runtime takes no more requests */
  OUTRIDER_FULL = 12     /* too many requests wait: try again later */
};

/* Why a generation ended. */
enum {
  OUTRIDER_STOPPED = 0,   /* an end token or a stop string */
  OUTRIDER_LENGTH = 1,    /* the limit, or the end of the context */
  OUTRIDER_CANCELLED = 2, /* outrider_session_cancel, outrider_request_cancel, or what the callback returned */
  OUTRIDER_DEADLINE = 3   /* the request's deadline has passed */
};

/* What a callback returns. */
enum { OUTRIDER_CONTINUE = 0, OUTRIDER_STOP = 1 };

typedef struct outrider_runtime outrider_runtime;   /* a loaded plan: weights and tokenizer, shared by its sessions */
typedef struct outrider_session outrider_session;   /* one sequence of tokens */
typedef struct outrider_params outrider_params;     /* options of a generation */
typedef struct outrider_result outrider_result;     /* what a generation gave */
typedef struct outrider_text outrider_text;         /* a text that a call made */
typedef struct outrider_branches outrider_branches; /* what a run of branches gave */
typedef struct outrider_request outrider_request;   /* a request that is served beside others */

/* Log-probabilities of tokens, where the option "logprobs" asks for them: natural logarithms under the model's own
 * distribution, before rules, temperature and filters. They are those of the last `count` tokens; 0 without the
 * option. */
typedef struct {
  size_t count;
  const double *logprobs;     /* [count], of the tokens themselves */
  size_t top;                 /* most probable tokens listed for each token: the option's number */
  const int64_t *top_tokens;  /* [count][top], the most probable first */
  const double *top_logprobs; /* [count][top] */
} outrider_logprobs;

/* Tokens that a request has given, and their text. */
typedef struct {
  const int64_t *tokens; /* [count]; an end token is among them */
  size_t count;
  const char *text; /* what is certain now, which may be less or more than those tokens' text; a zero is after it */
  size_t length;
  const outrider_logprobs *logprobs;
  int32_t over; /* 1: nothing follows, and outrider_request_result has all of it */
} outrider_span;

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

/* Loads the plan in folder `plan`. `options`, a JSON object or nothing: "backend" (its name; default: the best that
 * runs here), "threads" (0: the backend chooses), "verify" (false: skip the files' sha256), "cuda_graphs",
 * "share_memory" (true: weights that all processes of the machine map, where they would be packed in each), "exactness"
 * ("unchecked": run the plan even where drafts and neighbours may change its tokens; default: "probed").
 *
 * "prefix_cache": what is kept of all sessions and requests for all, an object of "max_cached_tokens" (65536),
 * "memory_bytes" (2**30, which may be less than these tokens need), "state_bytes" (2**28, of models that keep states),
 * "min_prefix_length" (4), "enable_auto_eviction" (true), "eviction_threshold" (0.9), "eviction_target" (0.8),
 * "enable_stats" (true). Nothing is kept without it.
 * "prefix_cache_tokens": N is short for {"max_cached_tokens": N}; 0 is none.
 *
 * "scheduler": how submitted requests are served, an object of "max_running" (at once; default: the number of the
 * plan's branches), "max_waiting" (1024; more are refused), "max_waiting_per_client", "prefill_tokens" (of prompts in a
 * pass in which other requests decode; default: the plan's chunk), "mode" ("batching" or "in-one-sequence"), "overlap"
 * (true: the text of a pass is made out while the next one runs). */
OUTRIDER_API outrider_status outrider_runtime_open(const char *plan, size_t plan_length, const char *options,
                                                   size_t options_length, outrider_runtime **out);

/* Takes no more requests, and waits until those under way are over. What is not over after `timeout_ms` is cancelled,
 * and ends at its next token: OUTRIDER_TIMEOUT. A timeout below 0 is none, 0 cancels everything at once. Sessions and
 * branches stay as they are. Requests keep what they have given, until they are destroyed. */
OUTRIDER_API outrider_status outrider_runtime_drain(outrider_runtime *runtime, int64_t timeout_ms);

/* Lets go of the plan. Its sessions and the requests under way continue, and memory is given back with the last of
 * them. A submission that comes at the same time is served, or gets OUTRIDER_CLOSED. */
OUTRIDER_API outrider_status outrider_runtime_close(outrider_runtime *runtime);

/* Counts since the plan was loaded, as a JSON object: "backend"; "scheduler", of all submitted requests ("waiting",
 * "running", "refused", "new_tokens", "ttft_ms" ...); "prefix_cache" (null without one); "memory", in bytes. */
OUTRIDER_API outrider_status outrider_runtime_stats(const outrider_runtime *runtime, outrider_text **out);

/* How many tokens a prompt has, special ones that the tokenizer adds included. One that does not fit the context, or is
 * empty, is OUTRIDER_REQUEST. */
OUTRIDER_API outrider_status outrider_count_tokens(outrider_runtime *runtime, const char *prompt, size_t prompt_length,
                                                   size_t *count);
/* The same of a conversation, as outrider_generate_messages takes it; of `params`, which may be NULL,
 * "chat_template_kwargs" are read. */
OUTRIDER_API outrider_status outrider_count_message_tokens(outrider_runtime *runtime, const char *messages,
                                                           size_t messages_length, const outrider_params *params,
                                                           size_t *count);

/* Writes the prefix cache to the file `path`, or adds to the cache what was written. `tokens`, which may be NULL, gets
 * how many. Only the same plan, processor and build reads a file: any other is OUTRIDER_PLAN, as is one that is
 * damaged. */
OUTRIDER_API outrider_status outrider_runtime_save_prefix_cache(outrider_runtime *runtime, const char *path,
                                                                size_t path_length, size_t *tokens);
OUTRIDER_API outrider_status outrider_runtime_load_prefix_cache(outrider_runtime *runtime, const char *path,
                                                                size_t path_length, size_t *tokens);

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

/* Sets the option `key` by the call of its type: int, double, bool (0 or 1), text (JSON is a text too), or a call that
 * adds to a list.
 *
 * - max_new_tokens (int): Most tokens to generate; the context's end comes first where it is nearer. Pass a whole
 *   number of at least 1; default: 128.
 * - stop (add_text): Texts before which the generation ends; a special token's spelling makes it an end token. Pass
 *   a text, or a list of at most 16 texts of at most 1000 bytes.
 * - eos_token_ids (add_int): End tokens, in place of the plan's. Pass a list of token ids.
 * - ignore_eos (bool): Continue past end tokens. Pass true or false; default: false.
 * - temperature (double): What logits are divided by; 0 is greedy, and no filter has an effect. Pass a number from 0
 *   to 100; default: 0.0.
 * - top_k (int): Keep the k most probable tokens, ties included; 0 is off. Pass a whole number of at least 0;
 *   default: 0.
 * - top_p (double): Keep the most probable tokens up to a sum of p; 1 is off. Pass a number above 0 and at most 1;
 *   default: 1.0.
 * - min_p (double): Keep tokens that are at least this share as probable as the most probable one; 0 is off. Pass a
 *   number from 0 to 1; default: 0.0.
 * - top_n_sigma (double): Keep tokens at most this number of standard deviations of all logits below the largest; 0
 *   is off. Pass a number from 0 to 100; default: 0.0.
 * - filter_order (text): Temperature before the filters, or after them. Pass one of temperature_first,
 *   temperature_last; default: temperature_first.
 * - seed (int): Seed of the draws; default: a new one, which the result has. Pass a whole number from 0 to
 *   18446744073709551615.
 * - stream_id (int): Which of the seed's streams of draws; a branch adds its number to it. Pass a whole number of at
 *   least 0; default: 0.
 * - skip_sample_adjustment (bool): For debugging drafters with acceptance: rejection: draw a rejected token's
 *   replacement from the target's own distribution, which is wrong. Pass true or false; default: false.
 * - structured_outputs (text): The form of the text: json (a schema), json_object (true), regex, grammar (Lark or
 *   llama.cpp), choice. Pass an object of one key, such as {"regex": "[0-9]+"}.
 * - allowed_token_ids (add_int): The only tokens that may be generated. Pass a list of at least one token id.
 * - bad_words (add_text): Texts that are not generated: the last token of one is excluded after the ones before it.
 *   Pass a list of at most 1000 texts of at most 1000 bytes.
 * - min_tokens (int): No end token and no end by a stop text before this number of tokens. Pass a whole number of at
 *   least 0; default: 0.
 * - logit_bias (text): Numbers added to the logits of tokens, by their ids. Pass numbers by token id, such as
 *   {"50256": -100}.
 * - repetition_penalty (double): Divides logits above 0 of tokens of the prompt and the text, and multiplies those
 *   below; 1 is off. Pass a number from 1e-06 to 1e+06; default: 1.0.
 * - frequency_penalty (double): Subtracted from a token's logit for each time that the token was generated. Pass a
 *   number from -2 to 2; default: 0.0.
 * - presence_penalty (double): Subtracted once from the logit of a token that was generated. Pass a number from -2
 *   to 2; default: 0.0.
 * - drafter (text): A drafter of the plan, or none; default: its first. Pass the name of a drafter, or none.
 * - draft_tokens (int): Draft at most this number of tokens in a pass, of a tree the likeliest. Pass a whole number
 *   of at least 1.
 * - draft_depth (int): Draft at most this number of tokens after each other. Pass a whole number of at least 1.
 * - auto_disable (bool): Draft, run ahead and verify only where that pays, by the clock. Pass true or false;
 *   default: true.
 * - remember (bool): Keep the tokens for later drafts of other requests, where the drafter has a memory. Pass true
 *   or false; default: true.
 * - partial_kv (text): After long contexts, where the plan has a partial KV cache: lossless has the tokens of off;
 *   default: the plan's. Pass one of lossless, lossy, off.
 * - partial_budget (int): Blocks that the partial KV cache retrieves; default: the plan's. Pass a whole number of at
 *   least 1 or -1 (auto).
 * - logprobs (int): Return each token's log-probability, and those of this number of the most probable tokens. Pass
 *   a whole number from 0 to 20.
 * - cache_salt (text): Prefix cache and memories are shared among requests of equal salt alone, so that times reveal
 *   nothing about other requests. Pass a text of at most 256 characters.
 * - generated (add_int): Tokens that the same request has returned before, elsewhere or before a restart; it
 *   continues after them with the tokens and the text that it would have had. Pass a list of token ids.
 * - chat_template_kwargs (text): of messages, a JSON object of what else the chat template reads.
 * - priority (int), deadline (double), client (text): of outrider_submit alone; a higher priority begins first (0), the
 *   deadline is in seconds from the submission, after which the request ends with what it has, and clients take turns.
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
/* Adds a text to a list. */
OUTRIDER_API outrider_status outrider_params_add_text(outrider_params *params, const char *key, size_t key_length,
                                                      const char *value, size_t value_length);
/* Adds a token id to a list. */
OUTRIDER_API outrider_status outrider_params_add_int(outrider_params *params, const char *key, size_t key_length,
                                                     int64_t value);
/* The same with `count` values at once. */
OUTRIDER_API outrider_status outrider_params_add_ints(outrider_params *params, const char *key, size_t key_length,
                                                      const int64_t *values, size_t count);

/* Changes the logits of the next token in place: `logits`, `vocabulary` of them, after the `count` tokens generated so
 * far. It is to depend on these alone: with drafts it is called for several continuations in turn. It runs in the
 * thread that generates, which for a submitted request is the one that runs the passes of all: others wait for it, and
 * it must not wait for a request. Returns OUTRIDER_CONTINUE; any other number, or a C++ exception, ends the generation
 * with OUTRIDER_CALLBACK. */
typedef int32_t (*outrider_on_logits)(void *user, const int64_t *tokens, size_t count, float *logits,
                                      size_t vocabulary);

/* Adds a function that changes logits, called after those added before it. Penalties come after all of them. Of a
 * submitted request it may be called until outrider_request_destroy returns. */
OUTRIDER_API outrider_status outrider_params_add_logits_processor(outrider_params *params, outrider_on_logits on_logits,
                                                                  void *user);
OUTRIDER_API outrider_status outrider_params_destroy(outrider_params *params);

/* -- Generating --------------------------------------------------------------------------------------------------- */

/* Gets what a step committed: `count` tokens, more than one where a draft was accepted, and the text that is certain
 * now, which may be less or more than those tokens'. `tokens` and `text` are good until it returns. It runs in the
 * thread that called, and may call anything but what needs the session for itself. Returns OUTRIDER_CONTINUE or
 * OUTRIDER_STOP; any other number stops too. It must return: a C++ exception is caught and gives OUTRIDER_CALLBACK,
 * with what was committed before it still in the session; longjmp and the thread's cancellation are not. */
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

/* The same from a whole conversation, through the plan's chat template: `messages` is a JSON list of objects such as
 * {"role": "user", "content": "..."}. What is generated is the next message. The sequence becomes the conversation;
 * what was computed is kept as far as the two agree. */
OUTRIDER_API outrider_status outrider_generate_messages(outrider_session *session, const char *messages,
                                                        size_t messages_length, const outrider_params *params,
                                                        outrider_on_span on_span, void *user, outrider_result **out);

/* What the result holds; pointers are good until it is destroyed. The generated tokens, an end token included. */
OUTRIDER_API outrider_status outrider_result_tokens(const outrider_result *result, const int64_t **tokens,
                                                    size_t *count);
/* Their text, without end token and stop string. */
OUTRIDER_API outrider_status outrider_result_text(const outrider_result *result, const char **data, size_t *length);
/* OUTRIDER_STOPPED, OUTRIDER_LENGTH, OUTRIDER_CANCELLED or OUTRIDER_DEADLINE. */
OUTRIDER_API outrider_status outrider_result_finish_reason(const outrider_result *result, int32_t *reason);
/* The seed that it was drawn by: with it, the same request has the same tokens again. */
OUTRIDER_API outrider_status outrider_result_seed(const outrider_result *result, uint64_t *seed);
/* Of its tokens, after those of "generated". */
OUTRIDER_API outrider_status outrider_result_logprobs(const outrider_result *result, const outrider_logprobs **out);
/* Counts and times, as a JSON object: "new_tokens", "ttft_ms", "decode_tokens_per_second", "tokens_per_verify" ... */
OUTRIDER_API outrider_status outrider_result_stats(const outrider_result *result, const char **data, size_t *length);
OUTRIDER_API outrider_status outrider_result_destroy(outrider_result *result);

/* -- Requests served beside others -------------------------------------------------------------------------------- */

/* Says that outrider_request_next will give something without waiting: more tokens, or the end. It runs in one thread
 * of the library's own for all requests: it may call anything, and what it takes delays other notifications, not
 * passes. It may come before outrider_submit has returned, and once for several things that came. After a C++ exception
 * it is not called again: the request is cancelled, and outrider_request_next and outrider_request_result give
 * OUTRIDER_CALLBACK.
 *
 * An event loop has it write `request` to a pipe, or count up an eventfd, and calls outrider_request_next with timeout
 * 0. What it reads there may be of a request that it has read to its end since, or destroyed, which gives
 * OUTRIDER_INVALID_HANDLE. */
typedef void (*outrider_on_ready)(void *user, outrider_request *request);

/* Has `prompt` served beside others, and returns once it waits in the queue. The tokens are those that a session of its
 * own would give, in any company. A plan of several branches serves as many requests in each pass, a plan of one branch
 * one request after another. `params` may be NULL for defaults and destroyed while the request runs. `on_ready` may be
 * NULL; `user` is passed on to it. OUTRIDER_FULL where too many requests wait, OUTRIDER_CLOSED after
 * outrider_runtime_drain. */
OUTRIDER_API outrider_status outrider_submit(outrider_runtime *runtime, const char *prompt, size_t prompt_length,
                                             const outrider_params *params, outrider_on_ready on_ready, void *user,
                                             outrider_request **out);
/* The same from `count` token ids. */
OUTRIDER_API outrider_status outrider_submit_tokens(outrider_runtime *runtime, const int64_t *prompt, size_t count,
                                                    const outrider_params *params, outrider_on_ready on_ready,
                                                    void *user, outrider_request **out);
/* The same from a conversation, as in outrider_generate_messages. */
OUTRIDER_API outrider_status outrider_submit_messages(outrider_runtime *runtime, const char *messages,
                                                      size_t messages_length, const outrider_params *params,
                                                      outrider_on_ready on_ready, void *user, outrider_request **out);

/* All that has come since the last call, at least a token, a character or the end: waits for it. OUTRIDER_TIMEOUT after
 * `timeout_ms`; 0 looks and does not wait, below 0 waits as long as it takes. After the last token comes a span that
 * is `over`, or the error that ended the request; further calls give an empty one that is over, or the same error. A
 * span and what it points to are good until the request is destroyed. Of calls at once in several threads, each gets
 * other tokens. */
OUTRIDER_API outrider_status outrider_request_next(outrider_request *request, int64_t timeout_ms,
                                                   const outrider_span **span);

/* Waits for the end as outrider_request_next does: the whole generation, read or not, or the error that
 * ended it. The caller destroys the result. */
OUTRIDER_API outrider_status outrider_request_result(outrider_request *request, int64_t timeout_ms,
                                                     outrider_result **out);

/* Ends the request at its next token, or before it begins; what it has is its result, as OUTRIDER_CANCELLED. */
OUTRIDER_API outrider_status outrider_request_cancel(outrider_request *request);

/* Cancels the request, where it is not over. Once this returns, neither `on_ready` nor its functions of logits are
 * called any more: it waits for one that runs in another thread. May be called from any of them. */
OUTRIDER_API outrider_status outrider_request_destroy(outrider_request *request);

/* -- Branches ----------------------------------------------------------------------------------------------------- */

/* As outrider_on_span, for the branch of that number, counted from 0 in the order asked for. Returning OUTRIDER_STOP
 * ends that branch alone, and of samples asked for by "n" all of them. A C++ exception ends the run: nothing is
 * kept. */
typedef int32_t (*outrider_on_branch)(void *user, size_t branch, const int64_t *tokens, size_t count, const char *text,
                                      size_t length);

/* Continues a prompt in several branches at once, each with the tokens that it would have alone. `request` is a JSON
 * object: "prompt", a text or a list of token ids; "branches", a list of what each begins with after it: a text, token
 * ids, or an object of "prompt", "predicted_tokens" and options of its own (those of outrider_params, what is added to
 * being a list, "logit_bias" and "structured_outputs" objects); or, instead, "n", a number of samples of the prompt;
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
