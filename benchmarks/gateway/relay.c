/* The floor: the least a proxy in user space can do, in C. run.py measures gateways against it.
 *
 * Plain: each client connection has one connection to the engine, and bytes go both ways unread.
 * With --prefill, the two hops of prefill/decode and nothing else: the request goes to the prefill
 * engine with max_tokens 1, its kv_transfer_params go into the request for the decode engine, whose
 * bytes go back unread. No routing, no checks, no retries, no limits: not a proxy to use.
 *
 * relay --listen HOST:PORT --engine HOST:PORT [--prefill HOST:PORT]
 */
#include "net.h"

enum side { CLIENT, PREFILL, ENGINE, SIDES };

struct session {
  int fds[SIDES];
  struct buffer in[SIDES], out[SIDES];
};

static struct session *sessions[MAX_FDS];
static const char *engine_address, *prefill_address;
static int epoll;

static void join(struct session *s, enum side side, int fd) {
  s->fds[side] = fd;
  sessions[fd] = s;
}

static void opened(int client) {
  struct session *s = calloc(1, sizeof *s);
  if (!s) die("out of memory");
  s->fds[PREFILL] = -1;
  join(s, CLIENT, client);
  join(s, ENGINE, connect_to(engine_address));
  watch(epoll, s->fds[ENGINE]);
  if (!*prefill_address) return;
  join(s, PREFILL, connect_to(prefill_address));
  watch(epoll, s->fds[PREFILL]);
}

static void closed(struct session *s) {
  for (int side = 0; side < SIDES; side++) {
    release(&s->in[side]);
    release(&s->out[side]);
    if (s->fds[side] < 0) continue;
    sessions[s->fds[side]] = NULL;
    close(s->fds[side]);
  }
  free(s);
}

static bool send_to(struct session *s, enum side side) { return flush(s->fds[side], &s->out[side]); }

/* Bytes read on one side become bytes to write on the other, without a copy in the usual case. */
static bool pass(struct session *s, enum side from, enum side to) {
  if (s->out[to].len) {
    append(&s->out[to], s->in[from].data, s->in[from].len);
    s->in[from].len = 0;
  } else {
    struct buffer swapped = s->out[to];
    s->out[to] = s->in[from];
    s->in[from] = swapped;
  }
  return send_to(s, to);
}

/* ---- prefill/decode ---- */

/* Appends the request with `members` added to its JSON object; its other bytes stay. */
static void append_request(struct buffer *out, const struct buffer *in, const struct message *m, const char *members,
                           size_t n) {
  const char *length = find_header(in->data, m->head_len, "content-length:");
  size_t before = (size_t)(length - in->data), digits = strcspn(length, "\r");
  append(out, in->data, before);
  append_text(out, "%zu", m->body_len + 1 + n);
  append(out, length + digits, m->head_len - before - digits);
  append(out, in->data + m->head_len, m->body_len - 1);
  append(out, ",", 1);
  append(out, members, n);
  append(out, "}", 1);
}

static bool start_prefill(struct session *s) {
  static const char members[] =
      "\"max_tokens\":1,\"stream\":false,\"kv_transfer_params\":{\"do_remote_decode\":true,\"do_remote_prefill\":false,"
      "\"remote_engine_id\":null,\"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}";
  struct message m;
  if (!parse_head(&s->in[CLIENT], &m) || s->in[CLIENT].len < m.head_len + m.body_len) return true;
  append_request(&s->out[PREFILL], &s->in[CLIENT], &m, members, sizeof members - 1);
  return send_to(s, PREFILL);
}

static bool start_decode(struct session *s) {
  struct buffer *request = &s->in[CLIENT], *response = &s->in[PREFILL];
  struct message m;
  if (!parse_head(response, &m) || response->len < m.head_len + m.body_len) return true;
  const char *body = response->data + m.head_len;
  const char *key = memmem(body, m.body_len, "\"kv_transfer_params\":{", 22);
  const char *end = key ? memchr(key, '}', (size_t)(body + m.body_len - key)) : NULL;
  if (!end) die("the prefill engine gave no hand-off: %.*s", (int)m.body_len, body);
  size_t handoff_len = (size_t)(end + 1 - key), used = m.head_len + m.body_len;
  parse_head(request, &m);
  append_request(&s->out[ENGINE], request, &m, key, handoff_len);
  consume(request, m.head_len + m.body_len);
  consume(response, used);
  return send_to(s, ENGINE);
}

/* ---- events ---- */

static bool take(struct session *s, enum side side) {
  if (side == ENGINE) return pass(s, ENGINE, CLIENT);
  if (side == PREFILL) return start_decode(s);
  return *prefill_address ? start_prefill(s) : pass(s, CLIENT, ENGINE);
}

static void handle(int fd, uint32_t events) {
  struct session *s = sessions[fd];
  if (!s) return; /* closed by an earlier event of this batch */
  enum side side = fd == s->fds[CLIENT] ? CLIENT : fd == s->fds[ENGINE] ? ENGINE : PREFILL;
  bool alive = send_to(s, side);
  if (alive && events & EPOLLIN) alive = read_all(fd, &s->in[side]) && take(s, side);
  if (!alive || events & GONE) closed(s);
}

int main(int argc, char **argv) {
  epoll = epoll_create1(0);
  engine_address = option(argc, argv, "--engine", NULL);
  prefill_address = option(argc, argv, "--prefill", "");
  int listener = listen_on(option(argc, argv, "--listen", NULL));
  watch(epoll, listener);
  for (;;) {
    struct epoll_event events[MAX_EVENTS];
    int n = epoll_wait(epoll, events, MAX_EVENTS, -1);
    for (int i = 0; i < n; i++) {
      if (events[i].data.fd == listener) accept_all(epoll, listener, opened);
      else handle(events[i].data.fd, events[i].events);
    }
  }
}
