/* The load generator: closed-loop clients on keep-alive connections, every byte of every answer
 * checked. The first fault (status, framing, a token lost, doubled, out of order or of another
 * request, a missing [DONE], a leaked kv_transfer_params, a stall) ends the run with exit status 1.
 *
 * Each prompt begins with a number of its own, and engine.c repeats it in every token. Lengths are spread
 * evenly over N/2..3N/2 tokens: with one length for all, the streams would start and end in step.
 * TTFT counts from before the request is written until the first token's event is complete. The first
 * one of each connection is left out: all connect at once, and so does whoever serves them behind.
 * Prints one line of JSON: requests, tokens, seconds, percentiles of TTFT and of whole requests.
 *
 * load --target HOST:PORT --connections N --seconds S --tokens N [--stream 1|0]
 *      [--prompt-bytes N] [--allow-hand-off 1: a relay may pass "kv_transfer_params":null on]
 *      [--key KEY: sent as bearer token] [--quick-ack 1: acknowledge every segment at once]
 *      [--awake 1: looks for answers all the time, instead of sleeping until they come]
 */
#include "net.h"

#include <math.h>

enum { STALL_MS = 10000, FIRST_SEED = 10000000 };

struct client {
  struct buffer in, events; /* bytes as they came; de-chunked and not yet understood */
  struct message message;
  bool in_body, busy, done, used; /* used: an answer has come */
  long seed, tokens, tokens_wanted;
  double started_us;
};

struct series {
  double *values;
  size_t len, cap;
};

static struct client clients[MAX_FDS];
static struct series ttft_us, latency_us;
static const char *allow_handoff, *key;
static bool streaming, quick_ack;
static long mean_tokens, num_tokens, prompt_bytes, next_seed = FIRST_SEED, num_busy;
static double deadline_us;

_Noreturn static void fault(const char *what, const char *bytes, size_t n) {
  die("load: %s: %.*s", what, (int)(n < 400 ? n : 400), bytes);
}

static void record(struct series *s, double value) {
  if (s->len == s->cap) {
    s->cap = s->cap ? s->cap * 2 : 4096;
    s->values = realloc(s->values, s->cap * sizeof *s->values);
    if (!s->values) die("out of memory");
  }
  s->values[s->len++] = value;
}

/* ---- requests ---- */

static long choose_length(long seed) {
  uint64_t mixed = (uint64_t)seed * 0x9e3779b97f4a7c15u >> 32; /* Knuth's multiplicative hash */
  return mean_tokens - mean_tokens / 2 + (long)(mixed % (uint64_t)(mean_tokens / 2 * 2 + 1));
}

static void start_request(int fd) {
  static struct buffer body, request;
  struct client *c = &clients[fd];
  c->seed = next_seed++;
  c->tokens_wanted = choose_length(c->seed);
  c->tokens = 0;
  c->done = c->in_body = false;
  body.len = request.len = 0;
  append_text(&body, "{\"model\":\"bench\",\"messages\":[{\"role\":\"user\",\"content\":\"s%ld ", c->seed);
  reserve(&body, (size_t)prompt_bytes);
  for (long i = 0; i < prompt_bytes; i++) body.data[body.len++] = "lorem ipsum dolor sit amet "[i % 27];
  append_text(&body, "\"}],\"max_tokens\":%ld,\"temperature\":0.0,\"stream\":%s}",
              c->tokens_wanted, streaming ? "true" : "false");
  append_text(&request,
              "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nUser-Agent: load\r\nAccept: */*\r\n%s%s%s"
              "X-Request-Id: load-%ld\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
              *key ? "Authorization: Bearer " : "", key, *key ? "\r\n" : "", c->seed, body.len);
  append(&request, body.data, body.len);
  c->started_us = now_us();
  if (!c->busy) c->busy = true, num_busy++;
  if (send(fd, request.data, request.len, MSG_NOSIGNAL) != (ssize_t)request.len)
    die("load: a request was not taken in one piece: %s", strerror(errno));
}

static void record_ttft(const struct client *c, double now) {
  if (c->used) record(&ttft_us, now - c->started_us);
}

static void finish_request(int fd) {
  struct client *c = &clients[fd];
  double now = now_us();
  if (c->tokens != c->tokens_wanted) fault("tokens are missing", c->events.data, c->events.len);
  if (c->in.len) fault("bytes after the end", c->in.data, c->in.len);
  if (!streaming) record_ttft(c, now);
  record(&latency_us, now - c->started_us);
  num_tokens += c->tokens;
  c->used = true;
  if (now < deadline_us) return start_request(fd);
  c->busy = false;
  num_busy--;
}

/* ---- answers ---- */

static void check_handoff(const char *bytes, size_t n) {
  if (*allow_handoff != '1' && contains(bytes, n, "kv_transfer_params")) fault("the hand-off leaked", bytes, n);
}

static void check_content(struct client *c, const char *bytes, size_t n, long index) {
  char expected[64];
  snprintf(expected, sizeof expected, "\"content\":\" t%05ld.s%ld\"", index, c->seed);
  if (!contains(bytes, n, expected)) fault("not the token expected", bytes, n);
}

static void take_event(struct client *c, const char *event, size_t n) {
  if (n < 6 || memcmp(event, "data: ", 6)) fault("not an SSE event", event, n);
  if (c->done) fault("an event after [DONE]", event, n);
  check_handoff(event, n);
  if (n == 12 && !memcmp(event, "data: [DONE]", 12)) {
    c->done = true;
  } else if (!contains(event, n, "\"role\":\"assistant\"") || c->tokens) {
    check_content(c, event, n, c->tokens);
    if (c->tokens++ == 0) record_ttft(c, now_us());
  }
}

static void take_events(struct client *c) {
  struct buffer *b = &c->events;
  size_t at = 0;
  for (char *end; b->len > at && (end = memmem(b->data + at, b->len - at, "\n\n", 2)); at = (size_t)(end + 2 - b->data))
    take_event(c, b->data + at, (size_t)(end - b->data) - at);
  if (at) consume(b, at);
}

static void take_whole(struct client *c, const char *body, size_t n) {
  check_handoff(body, n);
  check_content(c, body, n, c->tokens_wanted - 1);
  const char *tokens = find_member(body, n, "\"completion_tokens\":");
  if (!tokens || strtol(tokens, NULL, 10) != c->tokens_wanted) fault("not the usage expected", body, n);
  c->tokens = c->tokens_wanted;
}

/* Takes whole chunks out of `in`. True at the last one. */
static bool take_chunks(struct client *c) {
  struct buffer *b = &c->in;
  size_t at = 0;
  bool ended = false;
  while (!ended) {
    char *line_end = b->len > at ? memmem(b->data + at, b->len - at, "\r\n", 2) : NULL;
    if (!line_end) break;
    size_t size = strtoul(b->data + at, NULL, 16), data_at = (size_t)(line_end + 2 - b->data);
    if (b->len < data_at + size + 2) break;
    if (memcmp(b->data + data_at + size, "\r\n", 2)) fault("bad chunk framing", b->data + at, b->len - at);
    append(&c->events, b->data + data_at, size);
    at = data_at + size + 2;
    ended = size == 0;
  }
  if (at) consume(b, at);
  return ended;
}

static bool take_head(struct client *c) {
  if (!parse_head(&c->in, &c->message)) return false;
  if (memcmp(c->in.data, "HTTP/1.1 200", 12)) fault("not status 200", c->in.data, c->in.len);
  if (streaming != c->message.chunked) fault("not the framing expected", c->in.data, c->in.len);
  consume(&c->in, c->message.head_len);
  return c->in_body = true;
}

static void take(int fd) {
  struct client *c = &clients[fd];
  if (!c->busy) fault("bytes nobody asked for", c->in.data, c->in.len);
  if (!c->in_body && !take_head(c)) return;
  if (streaming) {
    bool ended = take_chunks(c);
    take_events(c);
    if (!ended) return;
    if (!c->done || c->events.len) fault("the stream ended without [DONE]", c->events.data, c->events.len);
  } else {
    if (c->in.len < c->message.body_len) return;
    take_whole(c, c->in.data, c->message.body_len);
    consume(&c->in, c->message.body_len);
  }
  finish_request(fd);
}

/* ---- the run ---- */

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double quantile(const struct series *sorted, double q) {
  return sorted->len ? sorted->values[(size_t)ceil(q * (double)sorted->len) - 1] : 0.0;
}

static void report(double seconds) {
  qsort(ttft_us.values, ttft_us.len, sizeof(double), compare);
  qsort(latency_us.values, latency_us.len, sizeof(double), compare);
  printf("{\"requests\":%zu,\"tokens\":%ld,\"seconds\":%.6f,\"ttft_p50_us\":%.1f,\"ttft_p99_us\":%.1f,"
         "\"latency_p50_us\":%.1f,\"latency_p99_us\":%.1f}\n",
         latency_us.len, num_tokens, seconds, quantile(&ttft_us, 0.5),
         quantile(&ttft_us, 0.99), quantile(&latency_us, 0.5), quantile(&latency_us, 0.99));
}

int main(int argc, char **argv) {
  const char *target = option(argc, argv, "--target", NULL);
  long connections = atol(option(argc, argv, "--connections", NULL));
  double seconds = atof(option(argc, argv, "--seconds", NULL));
  mean_tokens = atol(option(argc, argv, "--tokens", NULL));
  streaming = *option(argc, argv, "--stream", "1") == '1';
  prompt_bytes = atol(option(argc, argv, "--prompt-bytes", "1024"));
  allow_handoff = option(argc, argv, "--allow-hand-off", "0");
  key = option(argc, argv, "--key", "");
  quick_ack = *option(argc, argv, "--quick-ack", "0") == '1';
  int wait_ms = *option(argc, argv, "--awake", "0") == '1' ? 0 : STALL_MS;
  int fds[MAX_FDS], on = 1, epoll = epoll_create1(0);
  for (long i = 0; i < connections; i++) watch(epoll, fds[i] = connect_to(target));
  double started_us = now_us(), heard_us = started_us;
  deadline_us = started_us + seconds * 1e6;
  for (long i = 0; i < connections; i++) start_request(fds[i]);
  while (num_busy) {
    struct epoll_event events[MAX_EVENTS];
    int n = epoll_wait(epoll, events, MAX_EVENTS, wait_ms);
    double looked_us = now_us();
    if (n) heard_us = looked_us;
    if (looked_us - heard_us >= STALL_MS * 1e3) die("load: nothing came for %d ms, %ld requests wait", STALL_MS, num_busy);
    for (int i = 0; i < n; i++) {
      int fd = events[i].data.fd;
      size_t before = clients[fd].in.len;
      if (events[i].events & EPOLLIN && !read_all(fd, &clients[fd].in)) fault("the connection was closed", "", 0);
      /* The kernel forgets it again, so it is said after each read. */
      if (quick_ack) setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &on, sizeof on);
      if (clients[fd].in.len > before) take(fd);
      if (events[i].events & GONE) fault("the connection was closed", "", 0);
    }
  }
  report((now_us() - started_us) / 1e6);
}
