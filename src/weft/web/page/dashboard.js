// The dashboard: the state arrives as server-sent events; details of the chosen version are fetched when it changes.
"use strict";

const MANY = 45, MOST_LINKS = 400, CHAIN_COLOURS = ["--blue", "--orange", "--green", "--violet", "--sky", "--red"];
const find = id => document.getElementById(id);
const {draw, text, number} = weftCharts;
let state = null, chosen = null, shown = null, isFollowing = true, showsAll = false, shownLinks = "";

const ms = seconds => seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(seconds * 1e3).toFixed(1)} ms`;
const bytes = value => value >= 1e9 ? `${(value / 1e9).toFixed(2)} GB` : value >= 1e4 ? `${(value / 1e6).toFixed(2)} MB` : `${value} B`;
const rate = (size, seconds) => seconds ? `${number(size / seconds / 1e9)} GB/s` : "–";
const median = values => values.length ? [...values].sort((a, b) => a - b)[values.length >> 1] : null;
const clock = at => new Date(at * 1e3).toLocaleTimeString();

async function fetched(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function show(next) {
  const before = state;
  const isNew = part => !before || JSON.stringify(before[part]) !== JSON.stringify(next[part]);
  state = next;
  showHead();
  showCards();
  if (isNew("versions") || isNew("plan")) showHistory();
  if (isNew("members")) showFleet();
  if (isNew("failures")) showFailures();
  showMatrix();
  const last = state.versions.at(-1);
  if (last && (isFollowing || chosen === null)) choose(last.version);
}

function showHead() {
  const members = state.members.filter(member => member.state === "joined").length;
  const expected = (state.controller.trainers ?? 0) + (state.controller.engine_ranks ?? 0);
  const going = state.under_way.map(each => `version ${each.version} under way since ${clock(each.since)}`);
  const settings = `${state.controller.mode ?? ""}, digest ${state.controller.digest ?? "?"}, delta ${state.controller.delta ?? "?"}`;
  const damaged = state.num_invalid ? [`${state.num_invalid} damaged lines in the events file`] : [];
  find("headline").textContent = [`${members} of ${expected} members`, settings, ...going, ...damaged].join(" · ");
}

function showCards() {
  const good = state.versions.filter(each => each.outcome === "committed");
  const times = good.map(each => each.seconds), pauses = good.map(each => each.pause_s);
  const last = good.at(-1), predicted = state.plan.predicted_s;
  const stalest = Math.max(0, ...state.members.filter(m => m.state === "joined").map(m => m.staleness));
  const facts = [
    ["version", state.committed ?? "–"],
    ["committed, aborted", `${state.num_committed}, ${state.num_aborted}`],
    ["update, median", times.length ? ms(median(times)) : "–"],
    ["predicted by its NICs", predicted ? ms(predicted) : "–"],
    ["pause, median", pauses.length ? ms(median(pauses)) : "–"],
    ["last version moved", last ? `${bytes(last.bytes)}, ${rate(last.bytes, last.seconds)}` : "–"],
    ["stalest engine", `${stalest} versions`],
    ["plan", state.plan.plan ? `${state.plan.num_links} links, ${state.plan.writes} writes` : "none yet"],
  ];
  find("cards").innerHTML = facts.map(([name, value]) => `<div class="card"><b>${text(value)}</b>${text(name)}</div>`).join("");
}

function showHistory() {
  const good = state.versions.filter(each => each.outcome === "committed");
  const series = [
    {name: "update", points: good.map(each => [each.version, each.seconds * 1e3])},
    {name: "pause", points: good.map(each => [each.version, each.pause_s * 1e3])},
  ];
  if (state.plan.predicted_s && good.length)
    series.push({name: "predicted", is_dashed: true, points: [good[0], good.at(-1)].map(each => [each.version, state.plan.predicted_s * 1e3])});
  draw(find("history"), {kind: "lines", x_name: "version", y_name: "ms", series});
}

function showFleet() {
  const sides = {trainer: [], engine: []};
  for (const member of state.members) sides[member.name.split(" ")[0]]?.push(member);
  const hosts = new Set(state.members.map(member => member.host));
  find("fleet-note").textContent = `${hosts.size} host${hosts.size === 1 ? "" : "s"}`;
  find("fleet").innerHTML = Object.entries(sides).map(([side, members]) =>
    `<h3>${members.length} ${side === "engine" ? "engine rank" : "trainer"}${members.length === 1 ? "" : "s"}: ${side === "engine" ? "version served" : "last version written"}</h3>` + members.map(member => {
      const kind = member.state === "joined" ? (member.staleness > 0 ? "stale" : "") : member.state;
      const note = [member.name, member.state, member.reason, member.host, member.device, member.staleness > 0 ? `${member.staleness} versions behind` : ""];
      return `<span class="member ${kind}" title="${text(note.filter(Boolean).join(", "))}">${text(member.name.split(" ")[1])}: ${member.version ?? "–"}${kind === "lost" ? " lost" : ""}</span>`;
    }).join("")).join("");
}

function showFailures() {
  const rows = [...state.failures].reverse().map(each => `<tr><td>${clock(each.at)}</td><td class="text">${text(each.what)}</td></tr>`);
  find("failures").innerHTML = rows.length ? `<table>${rows.join("")}</table>` : `<span class="good">none</span>`;
}

async function showMatrix() {
  if (!state.plan.plan || shownLinks === state.plan.plan) return;
  shownLinks = state.plan.plan;
  const links = await fetched("api/links");
  const trainers = [...new Set(links.map(link => link.trainer))].sort((a, b) => a - b);
  const engines = [...new Set(links.map(link => link.engine))].sort((a, b) => a - b);
  const row = new Map(trainers.map((rank, at) => [rank, at])), column = new Map(engines.map((rank, at) => [rank, at]));
  draw(find("matrix"), {
    kind: "matrix", unit: "MB", x_name: "engine rank", y_name: "trainer",
    columns: engines.map(String), rows: trainers.map(String),
    cells: links.map(link => [column.get(link.engine), row.get(link.trainer), link.planned / 1e6, link.transport]),
  });
}

async function choose(version) {
  chosen = version;
  const summary = state.versions.findLast(each => each.version === version);
  if (!summary || (shown?.version === version && shown.at === summary.at)) return;
  try {
    shown = await fetched(`api/versions/${version}`);
  } catch {
    find("sentence").textContent = `Version ${version}: its details are not kept any more, or the server does not answer.`;
    return;
  }
  if (chosen === version) showVersion();
}

function showVersion() {
  find("chosen").textContent = `${shown.version}, ${shown.outcome} in ${ms(shown.seconds)}`;
  const busy = shown.busiest ? ` Busiest network card: ${shown.busiest.member}'s, ${(shown.busiest.busy * 100).toFixed(0)}% busy.` : "";
  find("sentence").textContent = `${shown.sentence}.${busy}`;
  find("chain").innerHTML = shown.chain.map((cause, at) => {
    const share = (100 * cause.seconds / shown.seconds).toFixed(1);
    return `<span style="width:${share}%;background:var(${CHAIN_COLOURS[at % CHAIN_COLOURS.length]})" title="${text(`${cause.what}: ${ms(cause.seconds)}, ${share}%`)}">${text(cause.what)}</span>`;
  }).join("");
  showTimeline();
  showLinks();
}

function showTimeline() {
  const critical = new Set(shown.chain.map(cause => cause.member));
  const spans = shown.spans.filter(span => span.lane !== "chain" && span.member !== "controller" && !span.peer);
  const busy = new Map();
  for (const span of spans) if (!isWaiting(span)) busy.set(span.member, (busy.get(span.member) ?? 0) + span.duration_s);
  const names = [...busy.keys()];
  const kept = new Set(showsAll || names.length <= MANY ? names
    : [...names.filter(name => critical.has(name)), ...names.sort((a, b) => busy.get(b) - busy.get(a))].slice(0, MANY));
  find("all").textContent = showsAll ? "slowest members" : `all ${names.length} members`;
  find("all").hidden = names.length <= MANY;
  const bars = spans.filter(span => kept.has(span.member)).map(span => ({
    row: span.member, name: span.name, start: span.start_s * 1e3, end: (span.start_s + span.duration_s) * 1e3,
    is_critical: critical.has(span.member) && !isWaiting(span), is_waiting: isWaiting(span),
    note: span.num_bytes ? bytes(span.num_bytes) : "",
  }));
  if (bars.length) draw(find("timeline"), {kind: "timeline", unit: "ms", bars});
}

function isWaiting(span) { return span.name.startsWith("wait"); }

function showLinks() {
  const slowest = [...shown.links].sort((a, b) => (b.sent_s ?? 0) - (a.sent_s ?? 0)).slice(0, MOST_LINKS);
  const head = ["trainer → engine", "transport", "planned", "sent", "in", "rate", "of its limit", "arrived", "in"];
  const rows = slowest.map(link => {
    const share = link.limit && link.sent_s ? `${(100 * link.sent / link.sent_s / link.limit).toFixed(0)}%` : "–";
    const cells = [`${link.trainer} → ${link.engine}`, link.transport, bytes(link.planned), bytes(link.sent ?? 0), ms(link.sent_s ?? 0),
      rate(link.sent ?? 0, link.sent_s), share, link.arrived == null ? "–" : bytes(link.arrived), link.arrived == null ? "–" : ms(link.arrived_s)];
    const exact = `data-trainer="${link.trainer}" data-engine="${link.engine}" data-sent="${link.sent ?? ""}" data-arrived="${link.arrived ?? ""}" data-sent-s="${link.sent_s ?? ""}" data-arrived-s="${link.arrived_s ?? ""}"`;
    return `<tr ${exact}>${cells.map((cell, at) => `<td${at > 1 ? ' class="number"' : ""}>${text(cell)}</td>`).join("")}</tr>`;
  });
  const more = shown.links.length > MOST_LINKS ? `<tr><td colspan="9">and ${shown.links.length - MOST_LINKS} more</td></tr>` : "";
  find("links").innerHTML = `<tr>${head.map((name, at) => `<th${at > 1 ? ' class="number"' : ""}>${name}</th>`).join("")}</tr>${rows.join("")}${more}`;
}

function step(by) {
  const numbers = state.versions.map(each => each.version), at = numbers.lastIndexOf(chosen) + by;
  if (at < 0 || at >= numbers.length) return;
  isFollowing = at === numbers.length - 1;
  choose(numbers[at]);
}

function follow() { isFollowing = true; if (state?.versions.length) choose(state.versions.at(-1).version); }
function toggleAll() { showsAll = !showsAll; if (shown) showTimeline(); }

const KEYS = {ArrowLeft: () => step(-1), ArrowRight: () => step(1), l: follow, a: toggleAll, d: weftCharts.toggleTheme};
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  KEYS[event.key]?.();
});
find("earlier").onclick = () => step(-1);
find("later").onclick = () => step(1);
find("latest").onclick = follow;
find("all").onclick = toggleAll;
find("theme").onclick = weftCharts.toggleTheme;
for (const id of ["history", "timeline", "matrix"]) weftCharts.addButtons(find(id).parentElement.querySelector(".bar"), find(id), id);
weftCharts.useTheme();

function listen() {
  const source = new EventSource("api/changes");
  source.onmessage = event => show(JSON.parse(event.data));
  source.onerror = () => { find("headline").textContent = "the dashboard's server does not answer; trying again …"; };
}
listen();
