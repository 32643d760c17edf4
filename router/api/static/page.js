"use strict";
const at = id => document.getElementById(id);

// A table row; every value becomes text, never markup.
function row(cells) {
  const line = document.createElement("tr");
  for (const cell of cells) {
    const box = line.appendChild(document.createElement("td"));
    box.className = "number";
    box.append(cell instanceof Node ? cell : String(cell ?? "–"));
  }
  return line;
}

function bar(...shares) {
  const box = document.createElement("span");
  box.className = "bar";
  for (const share of shares)
    box.appendChild(document.createElement("i")).style.width = `${100 * Math.min(share, 1)}%`;
  return box;
}

function labelled(element, label) {
  const box = document.createElement("span");
  box.append(element, ` ${label}`);
  return box;
}

const pool = p => labelled(bar(p.in_use / p.total, p.cached / p.total),
  `${p.in_use} in use, ${p.cached} cached of ${p.total}`);
const rate = h => h.looked_up_tokens ? h.hit_tokens / h.looked_up_tokens : 0;

function note(link) {
  const text = link.error ?? link.warning ?? (link.bytes_per_s === null ? "not measured yet" : "");
  return Object.assign(document.createElement("span"),
    { className: link.error || link.warning ? "bad" : "muted", textContent: text });
}

function show(cluster) {
  const phases = Object.entries(cluster.phases).filter(([, n]) => n).map(([p, n]) => `${n} ${p}`);
  at("summary").textContent = `${cluster.model} · ${cluster.ready ? "ready" : "not ready: no decode node"}`
    + ` · ${cluster.waiting} waiting${phases.length ? " · " + phases.join(", ") : ""}`;
  at("nodes").replaceChildren(...cluster.nodes.map(n => row(
    [n.name, n.role, n.state, n.running, n.waiting, pool(n.blocks), pool(n.slots), n.address])));
  at("links").replaceChildren(...cluster.links.map(l => row(
    [l.from, l.to, l.lanes.join(", ") || null, l.bytes_per_s === null ? null : (l.bytes_per_s / 1e9).toFixed(2),
     l.round_trip_s === null ? null : `${(l.round_trip_s * 1e6).toFixed(0)} µs`, note(l)])));
  at("hits").replaceChildren(...cluster.hits.map(h => row(
    [h.node, h.role, h.group, labelled(bar(rate(h)), `${(100 * rate(h)).toFixed(1)} %`),
     h.hit_tokens, h.looked_up_tokens])));
  at("requests").replaceChildren(...cluster.requests.map(r => row(
    [r.error ? `${r.phase}: ${r.error}` : r.phase, r.prompt_tokens, r.cached_tokens, r.generated_tokens,
     r.prefill_node, r.decode_node, r.migrations, `${r.age_s.toFixed(1)} s`])));
}

// The key is kept for this tab alone, and goes to this router alone.
const withKey = headers => sessionStorage.key_ ? { ...headers, authorization: `Bearer ${sessionStorage.key_}` } : headers;

async function get(path) {
  const reply = await fetch(path, { headers: withKey({}) });
  at("key").hidden = reply.status !== 401 && reply.status !== 403;
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  return reply;
}

async function poll() {
  try {
    const cluster = await (await get("cluster")).json();
    show(cluster);
    draw(cluster, gapsIn(await (await get("metrics")).text()));
  } catch (error) { at("summary").textContent = `the router does not answer: ${error.message}`; }
  setTimeout(poll, 1000);
}

at("key").onsubmit = event => {
  event.preventDefault();
  sessionStorage.key_ = at("secret").value.trim();
  at("secret").value = "";
};

// ---------------------------------------------------------------- drawings: SVG, all text as text

const KEPT = 180;  // polls: three minutes
const polls = [];

function shape(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Number and sum of the gaps between tokens so far.
function gapsIn(metrics) {
  const value = name => Number(metrics.match(new RegExp(`^headrace_inter_token_seconds_${name} (\\S+)`, "m"))?.[1] ?? 0);
  return { count: value("count"), sum: value("sum") };
}

const total = (nodes, name) => nodes.reduce((sum, n) => sum + (n.counters[name] ?? 0), 0);

function draw(cluster, gaps) {
  const groups = cluster.hits.filter(h => h.group === "state").length ? "state" : "attention";
  const hits = cluster.hits.filter(h => h.group === groups);
  polls.push({ at: performance.now() / 1000, gaps, nodes: cluster.nodes, tokens: total(cluster.nodes, "sampled_tokens"),
    hit: hits.reduce((sum, h) => sum + h.hit_tokens, 0), asked: hits.reduce((sum, h) => sum + h.looked_up_tokens, 0) });
  if (polls.length > KEPT) polls.shift();
  const pairs = polls.slice(1).map((now, i) => [polls[i], now]);
  const rise = (a, b, key) => Math.max(0, b[key] - a[key]);  // a node that restarts begins at 0 again
  chart("tokens", pairs.map(([a, b]) => rise(a, b, "tokens") / (b.at - a.at)), v => v.toFixed(0));
  chart("hit-share", pairs.map(([a, b]) => b.asked > a.asked ? rise(a, b, "hit") / rise(a, b, "asked") : null),
    v => `${(100 * v).toFixed(0)} %`, "hits-now", 1);
  chart("gaps", pairs.map(([a, b]) => b.gaps.count > a.gaps.count
    ? (b.gaps.sum - a.gaps.sum) / (b.gaps.count - a.gaps.count) : null), v => `${(1000 * v).toFixed(1)} ms`);
  map(cluster);
  at("ways").replaceChildren(...cluster.requests.slice(0, 8).map(r => row([r.id.slice(0, 24), way(r, cluster.requests)])));
}

// Values over time, the newest at the right; null where nothing happened.
function chart(id, values, text, label = `${id}-now`, most = Math.max(...values.filter(v => v !== null), 1e-9)) {
  const points = values.flatMap((v, i) => v === null ? [] : [`${300 - 300 * (values.length - 1 - i) / KEPT},${58 - 55 * v / most}`]);
  at(id).replaceChildren(shape("polyline", { points: points.join(" ") }));
  const last = values.findLast(v => v !== null);
  at(label).textContent = last === undefined ? "–" : text(last);
}

// Nodes that prefill at the left, those that decode at the right; a link is as wide as requests go over it.
function map(cluster) {
  const left = cluster.nodes.filter(n => n.role === "prefill"), right = cluster.nodes.filter(n => n.role !== "prefill");
  const place = {}, parts = [], before = polls[polls.length - 2];
  for (const [x, side] of [[40, left], [620, right]]) side.forEach((n, i) => { place[n.name] = [x, 20 + 64 * i]; });
  for (const link of cluster.links) {
    const [from, to] = [place[link.from], place[link.to]];
    if (!from || !to) continue;
    const open = cluster.requests.filter(r => r.prefill_node === link.from && r.decode_node === link.to
      && !["done", "failed"].includes(r.phase)).length;
    parts.push(shape("line", { class: open ? "link flows" : "link", "stroke-width": 1 + Math.min(open, 12),
      x1: from[0] + 120, y1: from[1] + 22, x2: to[0] + 120, y2: to[1] + 22 }));
  }
  for (const n of cluster.nodes) {
    const [x, y] = place[n.name], old = before?.nodes.find(o => o.name === n.name);
    const sent = ["attention", "state"].reduce((sum, group) => {
      const key = `direction=sent,group=${group}/transfer_bytes`;
      return sum + Math.max(0, (n.counters[key] ?? 0) - (old?.counters[key] ?? n.counters[key] ?? 0));
    }, 0);
    parts.push(shape("rect", { class: n.state === "live" ? "node" : "node bad", x, y, width: 240, height: 44, rx: 6 }),
      shape("text", { x: x + 8, y: y + 18 }, `${n.name} (${n.role}, ${n.state})`),
      shape("text", { x: x + 8, y: y + 35 }, `${n.running} running, ${n.waiting} waiting${sent ? `, ${(sent / 1e6).toFixed(1)} MB/s out` : ""}`));
  }
  at("map").setAttribute("viewBox", `0 0 900 ${24 + 64 * Math.max(left.length, right.length, 1)}`);
  at("map").replaceChildren(...parts);
}

// One request's stages as a bar; all bars have one scale.
function way(request, all) {
  const longest = Math.max(...all.flatMap(r => r.stages.map(s => s.start_s + s.seconds)), 1e-3);
  const bar = shape("svg", { class: "way", viewBox: "0 0 600 16", preserveAspectRatio: "none" });
  for (const s of request.stages) {
    const part = shape("rect", { class: s.stage, x: 600 * s.start_s / longest, y: 1, height: 14,
      width: Math.max(600 * s.seconds / longest, 1) });
    part.append(shape("title", {}, `${s.stage}${s.node ? ` on ${s.node}` : ""}: ${(1000 * s.seconds).toFixed(1)} ms`));
    bar.append(part);
  }
  return bar;
}

// ---------------------------------------------------------------- chat

const messages = [];

function say(speaker, text) {
  const line = document.createElement("div");
  line.append(Object.assign(document.createElement("b"), { textContent: `${speaker}: ` }), text);
  at("transcript").append(line);
  return line;
}

// Server-sent events of one POST, as parsed JSON.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", part; !(part = await reader.read()).done;) {
    const lines = (text + part.value).split("\n\n");
    text = lines.pop();
    for (const line of lines)
      if (line !== "data: [DONE]") yield JSON.parse(line.slice("data: ".length));
  }
}

async function ask(question) {
  messages.push({ role: "user", content: question });
  say("you", question);
  const line = say("model", ""), words = line.appendChild(document.createTextNode(""));
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: withKey({ "content-type": "application/json" }),
    body: JSON.stringify({ messages, stream: true, max_tokens: 200, temperature: 0, headrace: { report: true } }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    words.data += event.choices[0]?.delta.content ?? "";
    at("transcript").scrollTop = at("transcript").scrollHeight;
    if (event.usage) {
      const u = event.usage;
      const note = `  (${u.headrace.path}: ${u.prompt_tokens} prompt, `
        + `${u.prompt_tokens_details.cached_tokens} cached, ${u.completion_tokens} generated)`;
      line.append(Object.assign(document.createElement("span"), { className: "muted", textContent: note }));
    }
  }
  messages.push({ role: "assistant", content: words.data });
}

at("ask").onsubmit = async event => {
  event.preventDefault();
  const question = at("text").value.trim(), button = event.submitter;
  if (!question) return;
  at("text").value = "";
  button.disabled = true;
  try { await ask(question); }
  catch (error) { messages.pop(); say("error", error.message); }
  button.disabled = false;
};
poll();
