/* A LOAD MOCK of vLLM's streaming server. It computes nothing; run.py starts it to put a gateway
 * under load with tokens that cost no GPU and next to no CPU.
 *
 * What it copies from vLLM 0.32: a response's head, each SSE chunk and the end are writes of their
 * own on a TCP_NODELAY socket; all running streams get their next token in the same step, one step
 * each --step-us; chunks have vLLM's members and length; a prefill request (do_remote_decode) is
 * answered with JSON that carries kv_transfer_params; return_token_ids brings the ids of the prompt,
 * once, and of each token. Of SGLang's server it copies that prefill and decode get the same request
 * at the same time, with a bootstrap_room in it.
 * What it adds: every token states its index and the number that the prompt begins with, so that load.c
 * notices a lost, doubled or mixed-up token; and it refuses what its role must never see (a decode engine without
 * its peer's hand-off, a prefill engine that shall decode), so that a gateway cannot quietly serve
 * an easier mode than the one being measured.
 *
 * engine --listen HOST:PORT --role prefill|decode|mixed --boot-id ID [--peer ID] [--step-us N]
 *        [--awake 1: looks on for 5 ms after it has heard something, instead of sleeping]
 */
#include "net.h"

enum { PROMPT_TOKENS = 256, AWAKE_US = 5000 };

struct conn {
  struct buffer in, out;
  long tokens, sent, seed;
  long running_at; /* index in `running`; -1 when no stream is on */
  bool tells_ids;
};

static struct conn conns[MAX_FDS];
static int running[MAX_FDS], num_running;
static const char *role, *boot_id, *peer;
static bool stepped;
static long num_requests;
static char prompt_ids[4096];

static void opened(int fd) { conns[fd] = (struct conn){.running_at = -1}; }

static void stop_stream(int fd) {
  long at = conns[fd].running_at;
  if (at < 0) return;
  running[at] = running[--num_running];
  conns[running[at]].running_at = at;
  conns[fd].running_at = -1;
}

static void closed(int fd) {
  stop_stream(fd);
  release(&conns[fd].in);
  release(&conns[fd].out);
  close(fd);
}

static void send_now(int fd, const char *bytes, size_t n) {
  struct buffer *out = &conns[fd].out;
  if (!out->len) {
    ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL);
    if (sent == (ssize_t)n) return;
    if (sent < 0 && errno != EAGAIN) return; /* the peer is gone: epoll reports it */
    if (sent > 0) bytes += sent, n -= (size_t)sent;
  }
  append(out, bytes, n);
}

/* ---- answers ---- */

static void answer(int fd, const char *status, const char *body) {
  char text[4096];
  int n = snprintf(text, sizeof text,
                   "HTTP/1.1 %s\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
                   "content-length: %zu\r\ncontent-type: application/json\r\n\r\n%s",
                   status, strlen(body), body);
  send_now(fd, text, (size_t)n);
}

static void refuse(int fd, const char *why) {
  char body[512];
  snprintf(body, sizeof body,
           "{\"error\":{\"message\":\"load mock, role %s: %s\",\"type\":\"BadRequestError\",\"param\":null,\"code\":400}}",
           role, why);
  answer(fd, "400 Bad Request", body);
}

static void answer_prefill(int fd, const char *request_id) {
  char body[2048];
  snprintf(body, sizeof body,
           "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion\",\"created\":1767225600,\"model\":\"bench\","
           "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\" x\"},\"logprobs\":null,"
           "\"finish_reason\":\"length\",\"stop_reason\":null}],\"usage\":{\"prompt_tokens\":256,\"total_tokens\":257,"
           "\"completion_tokens\":1},\"prompt_logprobs\":null,\"kv_transfer_params\":{\"do_remote_prefill\":true,"
           "\"do_remote_decode\":false,\"remote_block_ids\":[[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]],"
           "\"remote_engine_id\":\"%s\",\"remote_request_id\":\"chatcmpl-%s-0-82a6113c\",\"remote_host\":\"127.0.0.1\","
           "\"remote_port\":5601,\"tp_size\":1,\"dcp_size\":1,\"pp_size\":1,\"remote_num_tokens\":256,"
           "\"remote_blocks_expiry_time\":null,\"transfer_mode\":\"pull\",\"remote_prefill_cached_tokens\":0}}",
           request_id, boot_id, request_id);
  answer(fd, "200 OK", body);
}

static void answer_whole(int fd, const char *request_id) {
  struct conn *c = &conns[fd];
  char body[2048];
  snprintf(body, sizeof body,
           "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion\",\"created\":1767225600,\"model\":\"bench\","
           "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\" t%05ld.s%ld\",\"refusal\":null,"
           "\"tool_calls\":[],\"reasoning\":null},\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,"
           "\"token_ids\":null}],\"service_tier\":null,\"system_fingerprint\":null,\"usage\":{\"prompt_tokens\":256,"
           "\"total_tokens\":%ld,\"completion_tokens\":%ld,\"prompt_tokens_details\":null},\"prompt_logprobs\":null,"
           "\"kv_transfer_params\":null}",
           request_id, c->tokens - 1, c->seed, c->tokens + 256, c->tokens);
  answer(fd, "200 OK", body);
}

static void send_chunk(int fd, const char *delta, const char *finish, const char *ids, const char *prompt) {
  char event[4096], chunk[4200];
  int n = snprintf(event, sizeof event,
                   "data: {\"id\":\"chatcmpl-3f0c1f6d9a4b4f5e8b7a%08lx\",\"object\":\"chat.completion.chunk\","
                   "\"created\":1767225600,\"model\":\"bench\",\"choices\":[{\"index\":0,\"delta\":{%s},"
                   "\"logprobs\":null,\"finish_reason\":%s,\"token_ids\":%s}]%s}\n\n",
                   conns[fd].seed, delta, finish, ids, prompt);
  n = snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n", n, event);
  send_now(fd, chunk, (size_t)n);
}

static void send_token(int fd) {
  static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
  struct conn *c = &conns[fd];
  char delta[64];
  snprintf(delta, sizeof delta, "\"content\":\" t%05ld.s%ld\"", c->sent, c->seed);
  bool last = ++c->sent == c->tokens;
  send_chunk(fd, delta, last ? "\"length\"" : "null", c->tells_ids ? "[1001]" : "null", "");
  if (!last) return;
  send_now(fd, end, sizeof end - 1);
  stop_stream(fd);
}

/* The first token goes out at once (prefill takes no time here), the others step by step. */
static void start_stream(int fd) {
  static const char head[] =
      "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
      "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
  struct conn *c = &conns[fd];
  c->sent = 0;
  c->running_at = num_running;
  running[num_running++] = fd;
  send_now(fd, head, sizeof head - 1);
  send_chunk(fd, "\"role\":\"assistant\",\"content\":\"\"", "null", "null", c->tells_ids ? prompt_ids : "");
  send_token(fd);
  while (!stepped && c->running_at >= 0) send_token(fd);
}

static void step(void) {
  for (int i = num_running; i-- > 0;) send_token(running[i]); /* downwards: streams leave meanwhile */
}

/* ---- requests ---- */

/* Why this engine must not see this request; NULL when all is well. */
static const char *find_fault(const char *body, size_t len, const char *request_id) {
  bool prefill = contains(body, len, "\"do_remote_decode\":true");
  bool decode = contains(body, len, "\"do_remote_prefill\":true");
  bool room = contains(body, len, "\"bootstrap_room\":");
  if (!strcmp(role, "mixed")) return prefill || decode || room ? "a hand-off in single-instance mode" : NULL;
  if (room) return NULL;
  if (!strcmp(role, "prefill")) return prefill ? NULL : "a request that is not a prefill";
  if (!decode) return "a request without a hand-off";
  const char *engine_id = find_member(body, len, "\"remote_engine_id\":");
  if (!engine_id || strncmp(engine_id + 1, peer, strlen(peer))) return "a hand-off of an unknown engine";
  const char *remote_id = find_member(body, len, "\"remote_request_id\":");
  if (!remote_id || strncmp(remote_id + 1, "chatcmpl-", 9) || strncmp(remote_id + 10, request_id, strlen(request_id)))
    return "a hand-off of another request";
  return NULL;
}

static void serve(int fd, const char *head, size_t head_len, const char *body, size_t len) {
  struct conn *c = &conns[fd];
  char request_id[128] = "none";
  const char *header = find_header(head, head_len, "x-request-id:");
  if (header) snprintf(request_id, sizeof request_id, "%.*s", (int)strcspn(header, "\r\n"), header);
  const char *fault = find_fault(body, len, request_id);
  const char *tokens = find_member(body, len, "\"max_tokens\":");
  if (!tokens) tokens = find_member(body, len, "\"max_completion_tokens\":");
  const char *seed = find_member(body, len, "\"content\":\"s");
  const char *stream = find_member(body, len, "\"stream\":");
  c->tokens = tokens ? strtol(tokens, NULL, 10) : 0;
  c->seed = seed ? strtol(seed, NULL, 10) : 0;
  c->tells_ids = contains(body, len, "\"return_token_ids\":true");
  num_requests++;
  if (!memcmp(head, "GET", 3)) return answer(fd, "200 OK", "{\"model_path\":\"bench\",\"is_generation\":true}");
  if (fault) return refuse(fd, fault);
  if (c->tokens < 1) return refuse(fd, "a request without max_tokens");
  bool prefills = !strcmp(role, "prefill");
  if (prefills && contains(body, len, "\"bootstrap_room\":")) c->tokens = 1;
  else if (prefills) return c->tokens == 1 ? answer_prefill(fd, request_id) : refuse(fd, "max_tokens is not 1");
  if (stream && !strncmp(stream, "true", 4)) return start_stream(fd);
  answer_whole(fd, request_id);
}

static void serve_all(int fd) {
  struct buffer *in = &conns[fd].in;
  struct message m;
  while (conns[fd].running_at < 0 && parse_head(in, &m)) {
    if (m.chunked) die("chunked requests are not understood");
    if (in->len < m.head_len + m.body_len) return;
    /* A terminator for strtol and find_header: the byte belongs to nobody, or to the next request. */
    reserve(in, 1);
    char kept = in->data[m.head_len + m.body_len];
    in->data[m.head_len + m.body_len] = 0;
    serve(fd, in->data, m.head_len, in->data + m.head_len, m.body_len);
    in->data[m.head_len + m.body_len] = kept;
    consume(in, m.head_len + m.body_len);
  }
}

static void handle(int fd, uint32_t events) {
  struct conn *c = &conns[fd];
  bool alive = !(events & GONE) && flush(fd, &c->out);
  if (alive && events & EPOLLIN) alive = read_all(fd, &c->in);
  if (alive) serve_all(fd);
  if (!alive) closed(fd);
}

static void list_prompt_ids(void) {
  int n = snprintf(prompt_ids, sizeof prompt_ids, ",\"prompt_token_ids\":[");
  for (int i = 0; i < PROMPT_TOKENS; i++)
    n += snprintf(prompt_ids + n, sizeof prompt_ids - (size_t)n, "%s%d", i ? "," : "", 1001 + i);
  snprintf(prompt_ids + n, sizeof prompt_ids - (size_t)n, "]");
}

static int start_timer(long step_us) {
  struct timespec period = {step_us / 1000000, step_us % 1000000 * 1000};
  struct itimerspec spec = {.it_interval = period, .it_value = period};
  int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  if (fd < 0 || timerfd_settime(fd, 0, &spec, NULL) < 0) die("timerfd: %s", strerror(errno));
  return fd;
}

int main(int argc, char **argv) {
  role = option(argc, argv, "--role", NULL);
  boot_id = option(argc, argv, "--boot-id", NULL);
  peer = option(argc, argv, "--peer", "");
  list_prompt_ids();
  long step_us = atol(option(argc, argv, "--step-us", "0"));
  double awake_us = *option(argc, argv, "--awake", "0") == '1' ? AWAKE_US : 0, heard_us = 0;
  int epoll = epoll_create1(0), listener = listen_on(option(argc, argv, "--listen", NULL)), timer = -1;
  watch(epoll, listener);
  if ((stepped = step_us > 0)) watch(epoll, timer = start_timer(step_us));
  for (;;) {
    struct epoll_event events[MAX_EVENTS];
    int n = epoll_wait(epoll, events, MAX_EVENTS, now_us() - heard_us < awake_us ? 0 : -1);
    for (int i = 0; i < n; i++) {
      int fd = events[i].data.fd;
      uint64_t periods;
      if (fd == listener) accept_all(epoll, listener, opened);
      else if (fd == timer) {
        if (read(timer, &periods, sizeof periods) > 0) step();
      } else {
        handle(fd, events[i].events);
        heard_us = now_us();
      }
    }
  }
}
