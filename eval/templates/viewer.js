// Steps through saved episodes. Whatever a model wrote is put into the page as text (textContent), never as markup.
// Only one page of the list and one episode are ever in the page.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const ROWS = 12;        // episodes in a page of the list
  const FOLD = 2500;      // characters of a message that are shown before it is unfolded
  const SVG = "http://www.w3.org/2000/svg";
  const FLAGS = [[1, "rescued"], [2, "misled"], [4, "flat group"], [8, "truncated"]];
  const get = (id) => document.getElementById(id);

  let found = data.episodes.map((_, index) => index);  // places in data.episodes that pass the filters
  let at = 0;                                          // place in `found` of the episode that is shown
  const haystacks = [];                                // lower-case text by episode, made at a first search

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  const textOf = (said) => (typeof said[0] === "string" ? said[0] : said[0].join(""));
  const count = (number) => number.toLocaleString("en");
  const signed = (value) => (value < 0 ? "−" : value > 0 ? "+" : "") + Number(Math.abs(value).toPrecision(3));

  function whereOf(episode) {
    const step = episode.step === null ? "" : `step ${episode.step}, `;
    return `${step}${data.sources[episode.source].name}, ${data.problems[episode.problem].problem} #${episode.number}`;
  }

  // Grades of the answers: notes are graded too, and are no part of the outcome.
  function gradesOf(episode) {
    const turns = data.casts[episode.cast].turns;
    return episode.said.filter((said, u) => said[2] !== null && !turns[u].note).map((said) => said[2]);
  }

  // Filters

  function haystack(index) {
    const episode = data.episodes[index];
    const { problem, question, facts, gold } = data.problems[episode.problem];
    const texts = () => [problem, question, ...facts, gold, ...episode.said.map(textOf)];
    haystacks[index] ??= texts().join("\n").toLowerCase();
    return haystacks[index];
  }

  function filter() {
    const shown = found[at];
    const source = get("source").value;
    const step = get("step").value;
    const outcome = get("outcome").value;
    const words = get("search").value.trim().toLowerCase();
    const boxes = [...document.querySelectorAll("[name=flag]:checked")];
    const flags = boxes.reduce((sum, box) => sum | Number(box.value), 0);
    found = [];
    data.episodes.forEach((episode, index) => {
      if (source !== "" && episode.source !== Number(source)) return;
      if (step !== "" && String(episode.step) !== step) return;
      if ((episode.flags & flags) !== flags) return;
      if (outcome !== "" && episode.outcome !== outcome) return;
      if (words !== "" && !haystack(index).includes(words)) return;
      found.push(index);
    });
    show(Math.max(0, found.indexOf(shown)));
  }

  function fillFilters() {
    const add = (select, value, text) => select.append(new Option(text, value));
    add(get("source"), "", "all");
    data.sources.forEach((source, index) => {
      add(get("source"), index, source.evaluation ? `evaluation: ${source.name}` : source.name);
    });
    add(get("step"), "", "all");
    const steps = [...new Set(data.episodes.map((episode) => episode.step))].sort((a, b) => (a ?? 1e9) - (b ?? 1e9));
    for (const step of steps) add(get("step"), String(step), step === null ? "evaluations" : `step ${step}`);
  }

  // The list

  function showList() {
    const page = Math.floor(at / ROWS);
    const pages = Math.max(1, Math.ceil(found.length / ROWS));
    const rows = found.slice(page * ROWS, (page + 1) * ROWS).map((index, offset) => {
      const place = page * ROWS + offset;
      const episode = data.episodes[index];
      const button = make("button");
      button.type = "button";
      const what = make("bdi", "what", data.problems[episode.problem].question);
      what.prepend(...gradesOf(episode).map(gradeMark), " ");
      button.append(make("span", "where", whereOf(episode)), what);
      if (place === at) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => { show(place); get("rows").children[offset].firstChild.focus(); });
      const row = make("li");
      row.append(button);
      return row;
    });
    get("rows").replaceChildren(...rows);
    get("page").textContent = `page ${page + 1} of ${pages}`;
    get("page-back").disabled = page === 0;
    get("page-on").disabled = page + 1 >= pages;
    get("count").textContent = `${count(found.length)} of ${count(data.episodes.length)} episodes`;
  }

  function gradeMark(grade) {
    const mark = make("span", grade === 1 ? "right" : "wrong", grade === 1 ? "✓" : "✗");
    mark.setAttribute("role", "img");
    mark.setAttribute("aria-label", grade === 1 ? "right " : "wrong ");
    return mark;
  }

  // One episode

  function show(place) {
    at = place;
    showList();
    const none = found.length === 0;
    get("previous").disabled = none || at === 0;
    get("next").disabled = none || at + 1 >= found.length;
    get("position").textContent = none ? "No episode passes these filters" : `${count(at + 1)} of ${count(found.length)}`;
    get("shown").replaceChildren(...(none ? [] : episodeParts(data.episodes[found[at]])));
    drawReads();
  }

  function episodeParts(episode) {
    const problem = data.problems[episode.problem];
    const cast = data.casts[episode.cast];
    const marks = FLAGS.filter(([bit]) => episode.flags & bit).map(([, name]) => name);
    const about = make("div", "about", [whereOf(episode), cast.arm, ...marks].join(" · "));
    const talk = make("div", "talk");
    talk.append(...episode.said.map((said, u) => turnPart(said, u, cast)));
    const gold = make("p", "gold", "Gold answer: ");
    gold.append(make("bdi", "", problem.gold));
    const question = make("p", "problem");
    question.append(make("bdi", "", problem.question));
    return [about, question, factsPart(problem, cast), talk, gold];
  }

  function factsPart(problem, cast) {
    const list = make("ul", "facts");
    const parts = cast.parts ?? 1;  // runs saved before it was kept: facts without their holders
    for (let part = 0; part < parts; part += 1) {
      const facts = problem.facts.filter((_, index) => index % parts === part);
      const holders = cast.agents.filter((_, agent) => agent % parts === part).join(", ");
      const item = make("li", "", cast.parts === null ? "Facts: " : `Shown to ${holders}: `);
      item.append(make("bdi", "", facts.join(" ")));
      if (facts.length > 0) list.append(item);
    }
    return list;
  }

  function turnPart(said, u, cast) {
    const [, advantage, grade, finished] = said;
    const turn = cast.turns[u];
    const part = make("section", `turn agent-${turn.agent % 4}`);
    const header = make("header");
    header.append(make("b", "", `${u + 1}. ${cast.agents[turn.agent]}${turn.note ? ", note" : ""}`));
    const [mark, word] = grade === 1 ? ["✓", "right"] : ["✗", "wrong"];
    if (grade !== null) header.append(make("span", word, `${mark} ${word}`));
    const reads = turn.reads.map((v) => v + 1).join(", ");
    header.append(make("span", "", reads ? `reads ${reads}` : "reads nothing"));
    if (advantage !== null) header.append(make("span", "", `advantage ${signed(advantage)}`));
    if (!cast.trained_agents[turn.agent]) header.append(make("span", "", "untrained base"));
    else if (!turn.trained) header.append(make("span", "", "not trained on"));
    if (!finished) header.append(make("span", "wrong", "cut at its cap"));
    part.append(header, wordsPart(said, turn.trained));
    return part;
  }

  function wordsPart(said, trained) {
    const whole = textOf(said);
    const words = make("bdi", "said");
    words.dir = "auto";
    if (whole === "") {
      words.append(make("span", "silent", "(said nothing)"));
      return words;
    }
    fillWords(words, said, trained, FOLD);
    if (whole.length <= FOLD) return words;
    const box = make("div");
    const unfold = make("button", "unfold", `Show all ${count(whole.length)} characters`);
    unfold.type = "button";
    unfold.addEventListener("click", () => {
      fillWords(words, said, trained, Infinity);
      unfold.remove();
      drawReads();
    });
    box.append(words, unfold);
    return box;
  }

  // A message's first `most` characters: a span a token where the tokens are known, each tinted by the advantage.
  function fillWords(words, said, trained, most) {
    const level = trained ? tint(said[1]) : "";
    const pieces = typeof said[0] === "string" ? [said[0]] : said[0].filter((piece) => piece !== "");
    const parts = [];
    let room = most;
    for (const piece of pieces) {
      if (room <= 0) break;
      const text = piece.slice(0, room);
      room -= text.length;
      if (typeof said[0] === "string" && level === "") parts.push(text);
      else parts.push(make("span", `token ${level}`.trim(), text));
    }
    if (room <= 0 && most !== Infinity) parts.push("…");
    const all = make("span");  // at once: with dir=auto the browser looks through the text at every child that is added
    all.append(...parts);
    words.replaceChildren(all);
  }

  function tint(advantage) {
    if (!advantage) return "";
    const fifth = Math.max(1, Math.ceil((5 * Math.abs(advantage)) / data.most_advantage - 1e-9));
    return `${advantage > 0 ? "up" : "down"}-${Math.min(5, fifth)}`;
  }

  // Who read what: beside the messages a line for each message that was read, with an arrow into each of its readers.

  function drawReads() {
    const talk = document.querySelector(".talk");
    if (talk === null) return;
    talk.querySelector("svg")?.remove();
    const turns = data.casts[data.episodes[found[at]].cast].turns;
    const sources = [...new Set(turns.flatMap((turn) => turn.reads))].sort((a, b) => a - b);
    if (sources.length === 0) return;
    const gutter = 16 + 9 * sources.length;
    talk.style.setProperty("--gutter", `${gutter}px`);
    const boxes = [...talk.querySelectorAll(".turn")];
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("width", String(gutter));
    svg.setAttribute("role", "img");
    const names = [];
    sources.forEach((v, lane) => {
      const x = gutter - 13 - 9 * lane;
      const agent = `agent-${turns[v].agent % 4}`;
      const start = boxes[v].offsetTop + boxes[v].offsetHeight - 8;
      turns.forEach((turn, u) => {
        if (!turn.reads.includes(v)) return;
        const y = boxes[u].offsetTop + 9 + 6 * turn.reads.indexOf(v);
        line(svg, agent, `M${gutter} ${start}H${x}V${y}H${gutter - 5}`);
        line(svg, `head ${agent}`, `M${gutter - 1} ${y}l-7 -3.5v7z`);
        names.push(`${u + 1} reads ${v + 1}`);
      });
    });
    svg.setAttribute("aria-label", `Who read what, by message: ${names.join(", ")}`);
    talk.prepend(svg);
  }

  function line(svg, className, path) {
    const element = document.createElementNS(SVG, "path");
    element.setAttribute("class", className);
    element.setAttribute("d", path);
    svg.append(element);
  }

  // Wiring

  function move(by) {
    if (at + by >= 0 && at + by < found.length) show(at + by);
  }

  function turnPage(by) {
    const first = (Math.floor(at / ROWS) + by) * ROWS;
    if (first >= 0 && first < found.length) show(first);
  }

  function listen() {
    let waiting = 0;
    get("filters").addEventListener("submit", (event) => event.preventDefault());
    get("filters").addEventListener("change", filter);
    get("search").addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(filter, 120);
    });
    get("previous").addEventListener("click", () => move(-1));
    get("next").addEventListener("click", () => move(1));
    get("page-back").addEventListener("click", () => turnPage(-1));
    get("page-on").addEventListener("click", () => turnPage(1));
    document.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const busy = event.target.closest("input, select, textarea, .wide");
      if (!by || busy || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      move(by);
    });
    window.addEventListener("resize", drawReads);
  }

  fillFilters();
  listen();
  show(0);
})();
