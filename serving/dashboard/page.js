// Shows the server's document, which it requests again and again. All text gets in by textContent: names come from a registry.
import { add, clock, draw } from "./plot.js";

const STALE_MS = 12000, PAUSE_MS = 500, SERIES = 6;
const STEPS = {
  stage_shards: "load on shards", stage_serving: "load on serving", replay: "catch up", canary: "canary", flip: "flip",
  bake: "bake", unflip: "flip back", retire_serving: "retire on serving", retire_shards: "retire on shards",
};
const TIERS = { ram: "RAM", disk: "SSD", card: "card", hot: "hot copies", pinned: "pinned" };
const STATES = { ready: "good", up: "good", live: "good", refused: "bad", draining: "warn", staging: "warn", waiting: "warn", ending: "warn" };
const $ = (id) => document.getElementById(id);
let token = "", state = null, history = null, access = null, readAt = null, shown = "", colours = new Map();
const sections = new Map();

// Elements and numbers.

function element(name, { text, classes, ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined && text !== null) made.textContent = text;
  made.append(...children);
  return made;
}

const number = (value, digits = 0) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const percent = (share, digits = 2) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)}%`);
const latency = (ms) => (ms === null || ms === undefined ? "–" : ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2));
const rate = (value) => (value === null || value === undefined ? "–" : value >= 100 ? value.toFixed(0) : value.toFixed(1));

function bytes(size) {
  if (!size) return "–";
  const power = Math.min(4, Math.floor(Math.log10(size) / 3));
  return `${(size / 1000 ** power).toFixed(power ? 1 : 0)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

function lasts(seconds) {
  if (seconds < 90) return `${Math.max(0, seconds).toFixed(0)} s`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(0)} min` : seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(0)} d`;
}

const tag = (text, kind) => element("span", { text, classes: `tag ${STATES[kind] ?? "quiet"}` });

// Fills a table: columns are names, "#name" for numbers. Cells are texts or elements, undefined for one that the cell above
// takes the place of; row.head says which is the header, row.tall for how many rows the cells in row.shared stand.
function fill(table, columns, rows, empty, title) {
  const numeric = columns.map((one) => one.startsWith("#"));
  const names = columns.map((one, index) => element("th", { text: one.replace("#", ""), scope: "col", classes: numeric[index] ? "n" : "" }));
  const body = rows.map(({ cells, head = 0, classes = "", tall = 1, shared = [] }) => element("tr", { classes }, ...cells.flatMap((cell, index) => {
    if (cell === undefined) return [];
    const made = element(index === head ? "th" : "td", { classes: numeric[index] ? "n" : index === cells.length - 1 ? "text" : "" });
    if (index === head) made.scope = tall > 1 ? "rowgroup" : "row";
    if (tall > 1 && shared.includes(index)) made.rowSpan = tall;
    made.append(cell);
    return [made];
  })));
  if (!body.length) body.push(element("tr", {}, element("td", { text: empty, colspan: columns.length, classes: "quiet" })));
  table.replaceChildren(...(title ? [element("caption", { text: title })] : []), element("thead", {}, element("tr", {}, ...names)), element("tbody", {}, ...body));
}

// One model.

function sectionOf(model) {
  if (sections.has(model)) return sections.get(model);
  const id = `model-${sections.size}`, part = {};
  part.title = element("h2", { text: model, id });
  part.live = element("span");
  part.why = element("span", { classes: "why", id: `${id}-why` });
  part.button = element("button", { type: "button", "aria-describedby": `${id}-why` });
  part.button.onclick = () => askRollback(model);
  part.rollout = element("div", { classes: "rollout" });
  part.plots = element("div", { classes: "plots" });
  part.figures = new Map();
  part.versions = element("table");
  const wide = element("div", { classes: "wide", role: "region", tabindex: "0", "aria-label": `Versions of ${model}` }, part.versions);
  const head = element("div", { classes: "head" }, part.title, part.live, part.why, part.button);
  part.section = element("section", { "aria-labelledby": id }, head, part.rollout, part.plots, wide);
  $("models").append(part.section);
  sections.set(model, part);
  return part;
}

function showModel(told) {
  const part = sectionOf(told.model), { rollout, rollback } = told;
  const trials = told.canary ? [" ", tag(`canary: version ${told.canary.version}, ${percent(told.canary.share, 1)}`, "waiting")] : [];
  const quality = told.quality ? [" ", tag(`AUC ${number(told.quality.recent_auc, 4)} lately, ${number(told.quality.auc, 4)} of ${told.quality.scored} scores`, "up")] : [];
  part.live.replaceChildren(tag(told.live === null ? "no version is live" : `version ${told.live} is live`, told.live === null ? "refused" : "live"), ...trials, ...quality);
  const why = access.fixed || rollback.why_not;
  part.button.textContent = rollback.to === null ? "Roll back" : rollback.aborts ? `Abort, stay at version ${rollback.to}` : `Roll back to version ${rollback.to}`;
  part.button.disabled = Boolean(why);
  part.why.textContent = why;
  showRollout(part.rollout, rollout);
  fill(part.versions,
    ["version", "state", "#shards", "#replicas", "#serving", "#answering", "#requests/s", "#errors", "#p50 ms", "#p95 ms", "#p99 ms", "#hot rows hit", "#keys missing", "#rows", "#updates", "published"],
    told.versions.map((one) => {
      const recent = one.recent ?? {};
      const state = /^canary,/.test(one.role) ? "waiting" : one.role;
      return { cells: [
        String(one.version), tag(one.role, state), one.num_shards ? `${one.shards} of ${one.num_shards}` : "–", number(one.replicas), number(one.serving),
        number(one.answering), rate(recent.requests_per_s), percent(recent.error_rate), latency(recent.p50), latency(recent.p95), latency(recent.p99),
        percent(recent.hit_rate, 1), percent(recent.missing_rate, 1), bytes(one.rows_bytes), number(one.last_delta), one.published_at ? `${lasts(readTime() - one.published_at)} ago` : "–",
      ] };
    }), "no version is known");
}

const readTime = () => readAt ?? Date.now() / 1000;

function showRollout(place, rollout) {
  if (!rollout) {
    place.replaceChildren(element("p", { text: "There was no rollout yet.", classes: "quiet" }));
    return;
  }
  const { to_version: to, from_version: from } = rollout;
  const baked = rollout.bake_began_at === null ? "bake" : `bake ${lasts(rollout.baked_s)} of`;
  const details = [rollout.strategy, rollout.canary_share === null ? "" : `canary ${percent(rollout.canary_share, 1)}`, rollout.bake_s ? `${baked} ${lasts(rollout.bake_s)}` : ""];
  const title = `Rollout of version ${to}${from === null ? "" : ` in place of ${from}`}: ${rollout.state.replace("_", " ")}`;
  const since = rollout.active ? `running for ${lasts(readTime() - rollout.started_at)}, this step for ${lasts(readTime() - rollout.step_began_at)}` : `began ${clock(rollout.started_at)}`;
  const told = [...details, since].filter(Boolean).join(" · ");
  const steps = element("ol", { classes: "steps", "aria-label": "Steps of the rollout" }, ...rollout.steps.map((step) => {
    const made = element("li", { text: step.name.startsWith("roll:") ? `replicas ${Number(step.name.slice(5)) + 1}` : STEPS[step.name] ?? step.name, classes: step.state });
    made.append(element("span", { text: `, ${step.state}`, classes: "unseen" }));
    if (step.state === "running") made.setAttribute("aria-current", "step");
    return made;
  }));
  const parts = [element("h3", { text: title, classes: rollout.state === "done" ? "good" : rollout.active ? "" : "bad" }), element("p", { text: told, classes: "told" }), steps];
  if (rollout.reason) parts.push(element("p", { text: `Reason: ${rollout.reason}`, classes: "bad" }));
  if (rollout.active && !state.coordinator) parts.push(element("p", { text: "No coordinator is running, so nothing moves.", classes: "bad" }));
  const waiting = rollout.waiting_for.map((text) => element("li", { text: `waiting for ${text}` }));
  if (rollout.more_waiting) waiting.push(element("li", { text: `and ${rollout.more_waiting} more` }));
  if (waiting.length) parts.push(element("ul", { classes: "waiting" }, ...waiting));
  if (rollout.guards) parts.push(guardsTable(rollout));
  place.replaceChildren(...parts);
}

function guardsTable({ guards, limits, from_version: from, to_version: to }) {
  const table = element("table");
  const row = (name, one) => ({ cells: [name, number(one.requests), percent(one.error_rate), latency(one.p99_ms), one.mean_score === null ? "–" : one.mean_score.toFixed(4)] });
  const allowed = { cells: ["allowed", `from ${limits.min_requests}`, `+${percent(limits.max_error_rate_increase)}`, `×${limits.max_p99_ratio} + ${limits.p99_slack_ms} ms`, `±${limits.max_score_drift} deviations`] };
  const verdict = guards.breached ? "breached" : guards.compared ? "kept" : "not compared yet";
  fill(table, ["since the bake began", "#requests", "#errors", "#p99 ms", "#mean score"], [row(`version ${from}, live`, guards.live), row(`version ${to}, new`, guards.new), allowed], "",
    `Guards: ${verdict}${guards.reason ? `, ${guards.reason}` : ""}`);
  return table;
}

// Plots. A version keeps its colour for as long as the page is open.

function colour(key) {
  if (!colours.has(key)) colours.set(key, `s${colours.size % SERIES}`);
  return colours.get(key);
}

function figure(part, name, title) {
  if (!part.figures.has(name)) {
    const label = `${title}, the last 15 minutes; the table of versions has the last minute's numbers`;
    const readout = element("span", { classes: "readout" });
    const made = element("figure", {}, element("figcaption", {}, element("h3", { text: title }), readout));
    const svg = add(made, "svg", { class: "plot", role: "img", "aria-label": label });
    part.plots.append(made);
    part.figures.set(name, { svg, readout });
  }
  return part.figures.get(name);
}

function showPlots() {
  for (const { model } of state?.models ?? []) {
    const part = sectionOf(model), tracks = history.tracks.filter((one) => one.model === model);
    const shown = tracks.filter((one) => one.requests.some((value) => value)).slice(-4);
    const end = (history.slot + 1) * history.slot_s;
    const plot = (name, title, format, series, most) => {
      const { svg, readout } = figure(part, name, title);
      draw(svg, readout, { series, end, slot: history.slot_s, count: history.num_slots, format, most });
    };
    const line = (one, values, name, style = "") => ({ name, values, classes: `${colour(`${model} ${one.version}`)} ${style}`.trim() });
    plot("requests", "Requests a second, by version", rate, shown.map((one) => line(one, one.requests.map((value) => (value === null ? null : value / history.slot_s)), `v${one.version}`)));
    plot("latency", "Latency, ms: p99 solid, p95 dashed, p50 dotted", latency, shown.flatMap((one) => [
      line(one, one.p99, `v${one.version} p99`), line(one, one.p95, `v${one.version} p95`, "mid"), line(one, one.p50, `v${one.version} p50`, "low")]));
    for (const [share, title] of [["hit_rate", "Lookups answered by hot rows"], ["missing_rate", "Keys that their tables have not"]]) {
      if (tracks.some((one) => one[share].some((value) => value !== null))) {
        plot(share, title, (value) => percent(value, 0), shown.map((one) => line(one, one[share], `v${one.version}`)), 1);
      }
    }
  }
}

// Nodes and events.

function stateOf(node, version) {
  if (node.state !== "up") return tag(node.state, node.state);
  if (!version) return tag("holds nothing", "");
  return tag(version.state === "staging" ? `staging, ${percent(version.progress, 0)}` : version.state, version.state);
}

// One row for each version that a node holds; the cells in `shared` are the node's own, and stand once.
function perVersion(kind, shared, cells) {
  return state.nodes.filter((node) => node.kind === kind).flatMap((node) => {
    const versions = node.versions.length ? node.versions : [null];
    return versions.map((version, place) => ({
      cells: cells(node, version).map((cell, index) => (place && shared.includes(index) ? undefined : cell)),
      head: shared[0], tall: versions.length, shared,
    }));
  });
}

const named = (version) => (version ? `${version.model} ${version.version}` : "–");
const tiers = (version) => Object.entries(version?.memory_tiers ?? {}).map(([tier, size]) => `${TIERS[tier] ?? tier} ${bytes(size)}`).join(", ") || "–";

function lagOf(version) {
  if (!version || version.lag === null) return "–";
  if (!version.lag) return "0";
  const age = version.delta_published_at ? `, last of ${lasts(readTime() - version.delta_published_at)} ago` : "";
  return element("span", { text: `${version.lag} behind${age}`, classes: "warn" });
}

// Of all rollouts, the newest first.
function eventsOf(told) {
  return told.models.flatMap(({ model, rollout }) => (rollout?.events ?? []).map((one) => ({ ...one, model, text: `version ${rollout.to_version}: ${one.text}` })))
    .sort((one, other) => other.at - one.at);
}

function showNodes() {
  fill($("shards"), ["node", "#shard", "address", "#memory free", "version", "state", "rows by tier", "#updates", "#lag", "#leases", "remarks"],
    perVersion("shard", [0, 1, 2, 3], (node, version) => [
      node.node_id, number(node.shard_index), node.address || "–", bytes(node.memory_available_bytes), named(version), stateOf(node, version), tiers(version),
      number(version?.delta_sequence), lagOf(version), number(version?.leases), version?.reason ?? ""]),
    "No shard nodes: serving processes hold their rows themselves.");
  fill($("serving"), ["node", "address", "#memory free", "version", "state", "answers", "rows by tier", "#hot rows", "#updates", "#lag", "#leases", "#dense step", "#golden off by", "remarks"],
    perVersion("serving", [0, 1, 2], (node, version) => [
      node.node_id, node.address || "–", bytes(node.memory_available_bytes), named(version), stateOf(node, version),
      version && node.live[version.model] === version.version ? "✓ live" : "–", tiers(version),
      version?.hot ? `${version.hot.rows} (${bytes(version.hot.size_bytes)})` : "–", number(version?.delta_sequence), lagOf(version), number(version?.leases),
      number(version?.dense_step), typeof version?.golden_difference === "number" ? version.golden_difference.toExponential(1) : "–", version?.reason ?? ""]),
    "No serving process is announced.");
  fill($("events"), ["time", "what", "of", "details"],
    eventsOf(state).map((one) => ({ cells: [clock(one.at), STEPS[one.step] ?? one.step, one.model, one.text] })), "No rollout is on record.");
}

function showState(told) {
  const newest = eventsOf(told)[0];
  if (state && newest && newest.at !== eventsOf(state)[0]?.at) $("news").textContent = `${newest.model} ${newest.text}`;
  state = told;
  $("source").textContent = told.source.name;
  $("coordinator").textContent = told.source.fixed ? "" : told.coordinator ? `coordinator: ${told.coordinator}` : "no coordinator is running";
  $("coordinator").className = told.coordinator || told.source.fixed ? "" : "bad";
  const more = [told.more_models ? `${told.more_models} more models` : "", told.more_nodes ? `${told.more_nodes} more nodes` : ""].filter(Boolean).join(" and ");
  $("note").textContent = [told.source.note, more && `${more} are not shown`].filter(Boolean).join(". ");
  $("note").hidden = !$("note").textContent;
  $("problem").textContent = told.problem ? `What is shown is not of now: ${told.problem}` : "";
  $("problem").hidden = !told.problem;
  const names = new Set(told.models.map((one) => one.model));
  for (const [name, part] of sections) part.section.hidden = !names.has(name);
  told.models.forEach(showModel);
  showNodes();
}

// The connection.

function connection(kind, text) {
  if ($("connection").dataset.state !== kind || $("connection").textContent !== text) {
    $("connection").dataset.state = kind;
    $("connection").textContent = text;
  }
}

function take(told) {
  readAt = told.read_at;
  if (told.history) history = told.history;
  // What is as before is left alone: somebody may be reading or selecting it.
  const text = JSON.stringify([told.state, told.problem]);
  if (text !== shown) showState({ ...told.state, problem: told.problem, source: told.source });
  shown = text;
  if (readAt) connection("live", `live, read ${clock(readAt)}`);
  if (told.history || state.models.some((one) => !sections.get(one.model).figures.size)) showPlots();
}

const request = (path, headers) => fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(STALE_MS) });

// Whether to go on: without a right token nothing more is requested.
async function read() {
  if (!access) {
    const answer = await request("status/access");
    if (!answer.ok) throw new Error(await reasonOf(answer));
    access = await answer.json();
  }
  if (access.needs_token && !token) {
    askToken("");
    return false;
  }
  const answer = await request(`status?slot=${history?.slot ?? ""}`, token ? { authorization: `Bearer ${token}` } : {});
  if (answer.status === 401 || answer.status === 403) {
    askToken(token ? await reasonOf(answer) : "");
    return false;
  }
  if (!answer.ok) throw new Error(await reasonOf(answer));
  $("sign-in").hidden = true;
  $("main").hidden = false;
  take(await answer.json());
  return true;
}

async function reasonOf(answer) {
  const told = await answer.json().catch(() => null);
  return told?.error?.message ?? `HTTP ${answer.status}`;
}

function askToken(why) {
  token = "";
  connection("waiting", "waiting for a token");
  $("sign-in-error").textContent = why;
  $("main").hidden = true;
  $("sign-in").hidden = false;
  $("view-token").focus();
}

async function run() {
  for (;;) {
    try {
      if (!await read()) return;
    } catch (error) {
      connection("lost", `not connected: ${/^(Abort|Timeout)Error$/.test(error.name) ? "the server is silent" : error.message}`);
    }
    await new Promise((wake) => setTimeout(wake, PAUSE_MS));
  }
}

$("sign-in").onsubmit = (event) => {
  event.preventDefault();
  token = $("view-token").value;
  $("view-token").value = "";
  run();
};

// The button.

let asked = null;

function askRollback(model) {
  const { rollback, rollout, live } = state.models.find((one) => one.model === model);
  asked = { model, rollout_id: rollout.rollout_id, is_active: rollout.active, live };
  $("rollback-text").textContent = rollback.aborts
    ? `${model}: the rollout of version ${rollout.to_version} is ended, and version ${rollback.to} stays live.`
    : `${model}: version ${rollback.to} is rolled out again: loaded, checked and flipped to. No answer fails meanwhile.`;
  $("rollback-error").textContent = "";
  $("rollback").showModal();
  $("rollback-token").focus();
}

$("rollback-cancel").onclick = () => $("rollback").close();
$("rollback").onclose = () => { $("rollback-token").value = ""; };
$("rollback").querySelector("form").onsubmit = async (event) => {
  event.preventDefault();
  $("rollback-go").disabled = true;
  try {
    const headers = { "content-type": "application/json", authorization: `Bearer ${$("rollback-token").value}` };
    const answer = await fetch("status/rollback", { method: "POST", headers, body: JSON.stringify(asked) });
    if (!answer.ok) throw new Error(await reasonOf(answer));
    const { model, to } = await answer.json();
    $("news").textContent = `${model}: going back to ${to === null ? "no version" : `version ${to}`}`;
    $("rollback").close();
  } catch (error) {
    $("rollback-error").textContent = error.message;
    $("rollback-token").select();
  } finally {
    $("rollback-go").disabled = false;
  }
};

addEventListener("resize", () => { if (history && state) showPlots(); });

run();
