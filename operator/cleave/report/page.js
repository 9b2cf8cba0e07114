"use strict";
// Draws the charts in the reader's colours and answers the sliders. Loads nothing.

const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;

async function unpackPlotly() {
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

// Figures name CSS variables; Plotly wants colours.
function coloured(value, style) {
  if (typeof value === "string" && value.startsWith("var("))
    return style.getPropertyValue(value.slice(4, -1)).trim();
  if (Array.isArray(value)) return value.map((each) => coloured(each, style));
  if (value && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, coloured(each, style)]));
  return value;
}

function draw() {
  const style = getComputedStyle(root);
  const options = { displayModeBar: false, responsive: true };
  const drawn = [...document.querySelectorAll("[data-chart]")].map((place) => {
    const { data: traces, layout } = coloured(data.charts[place.dataset.chart], style);
    return Plotly.react(place, traces, layout, options);
  });
  return Promise.all(drawn);
}

function watchPaper() {
  addEventListener("beforeprint", () => {
    root.classList.add("paper");
    draw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("paper");
    draw();
  });
}

function watchSliders() {
  const names = ["rate", "ttft", "tpot"];
  const sliders = names.map((name) => document.getElementById(`slider-${name}`));
  if (!sliders[0]) return;
  const put = (id, text) => { document.getElementById(id).textContent = text; };
  const show = () => {
    const places = sliders.map((slider) => Number(slider.value));
    names.forEach((name, i) => {
      const text = data.whatIf[name][places[i]];
      put(`value-${name}`, text);
      sliders[i].setAttribute("aria-valuetext", text);
    });
    const at = (places[0] * data.whatIf.ttft.length + places[1]) * data.whatIf.tpot.length + places[2];
    const point = data.whatIf.points[at];
    const copies = data.whatIf.copies[at];
    put("what-plan", point ? (copies > 1 ? `${copies} x (${data.plans[point[0]].label})` : data.plans[point[0]].label) : "none of them holds this");
    put("what-goodput", point ? `${point[1]} req/s` : "-");
    put("what-per-gpu", point ? `${point[2]} req/s` : "-");
    put("what-gpus", point ? point[3] : "-");
  };
  sliders.forEach((slider) => slider.addEventListener("input", show));
  document.getElementById("reset").addEventListener("click", () => {
    sliders.forEach((slider) => { slider.value = slider.dataset.start; });
    show();
  });
  show();
}

watchSliders();
unpackPlotly().then(draw).then(() => {
  dark.addEventListener("change", draw);
  watchPaper();
  root.dataset.drawn = "true";
}, (fault) => {
  document.querySelectorAll(".plot").forEach((place) => {
    place.textContent = "This browser cannot draw the chart; its numbers are below.";
  });
  console.error(fault);
});
