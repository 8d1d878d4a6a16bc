"use strict";
// Draws the charts of the page in the reader's colour scheme, and sorts its tables.
(() => {
  const written = document.getElementById("content").textContent;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  const layout = (own) => {
    const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("faint"), automargin: true };
    return {
      ...own,
      xaxis: { ...axis, ...own.xaxis },
      yaxis: { ...axis, ...own.yaxis },
      font: { color: colour("ink"), family: "system-ui, sans-serif", size: narrow.matches ? 11 : 13 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("faint"), font: { color: colour("ink") }, align: "left" },
      // All of it is seen, apart from the axis by its border; plotly would let a long one scroll.
      legend: {
        orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, maxheight: 1, borderwidth: 5,
        bordercolor: "rgba(0,0,0,0)", font: { size: narrow.matches ? 10 : 12 },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("faint"), activecolor: colour("ink") },
      margin: { l: 10, r: 10, t: narrow.matches ? 10 : 32, b: 10 }, // the tools stand above the points
      hovermode: "closest",
      dragmode: narrow.matches ? false : "zoom",
    };
  };

  const settings = {
    displaylogo: false,
    displayModeBar: "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };

  // Of a size that is given: plotly itself would keep that of the first drawing.
  const show = (box, data, own, height) =>
    Plotly.react(box, data, { ...layout(own), width: box.clientWidth, height }, settings);

  // The differences of all rows to one: a pair that names it first is turned round.
  const differences = (pairs, reference) => {
    const found = pairs.filter((pair) => pair.a === reference || pair.b === reference).map((pair) => {
      const turned = pair.a === reference;
      const sign = turned ? -1 : 1;
      return {
        name: turned ? pair.b : pair.a,
        middle: sign * pair.difference,
        low: turned ? -pair.high : pair.low,
        high: turned ? -pair.low : pair.high,
        p: pair.p,
      };
    });
    found.sort((one, other) => one.middle - other.middle);
    const shown = found.map((each) => each.low > 0 || each.high < 0);
    const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
    const broken = (text) => text.replaceAll("/", "/<br>").replaceAll(" ", "<br>");
    return [{
      type: "scatter",
      mode: "markers",
      x: found.map((each) => each.middle),
      y: found.map((each) => (narrow.matches ? broken(escaped(each.name)) : escaped(each.name))),
      error_x: {
        type: "data",
        symmetric: false,
        array: found.map((each) => each.high - each.middle),
        arrayminus: found.map((each) => each.middle - each.low),
        color: colour("faint"),
        thickness: 1,
      },
      marker: { size: 10, color: colour("link"), symbol: shown.map((each) => (each ? "circle" : "circle-open")) },
      text: found.map((each) =>
        `<b>${escaped(each.name)}</b><br>${each.middle.toFixed(2)} points (${each.low.toFixed(2)} to ${each.high.toFixed(2)})<br>p ${each.p.toPrecision(3)}`),
      hovertemplate: "%{text}<extra></extra>",
    }];
  };

  const drawDifferences = (section, pairs) => {
    const box = section.querySelector(".difference");
    const data = differences(pairs, section.querySelector(".reference").value);
    const lines = narrow.matches ? Math.max(...data[0].y.map((name) => name.split("<br>").length)) : 1;
    const own = { xaxis: { title: { text: "points of top-1 accuracy" }, zerolinewidth: 2, zerolinecolor: colour("faint") } };
    show(box, data, { ...own, showlegend: false }, 80 + (11 + 14.5 * lines) * data[0].y.length);
  };

  const draw = () => {
    const content = JSON.parse(written, (key, value) => (value === "var(--ink)" ? colour("ink") : value));
    for (const section of document.querySelectorAll("section.data")) {
      const { charts, pairs } = content[section.dataset.number];
      for (const box of section.querySelectorAll("[data-chart]")) {
        const chart = charts[box.dataset.chart];
        // How many lines the legend takes is plotly's to say, where it has room; the chart above it keeps its height.
        show(box, chart.data, chart.layout, 480 + 24 * chart.data.length);
        show(box, chart.data, chart.layout, 352 + (box.querySelector(".legend")?.getBBox().height ?? 0));
      }
      if (pairs.length) drawDifferences(section, pairs);
    }
  };

  const fillReferences = () => {
    const content = JSON.parse(written);
    for (const section of document.querySelectorAll("section.data")) {
      const { pairs, reference } = content[section.dataset.number];
      const choice = section.querySelector(".reference");
      if (!choice) continue;
      for (const name of new Set(pairs.flatMap((pair) => [pair.a, pair.b]))) choice.add(new Option(name, name));
      choice.value = reference;
      choice.addEventListener("change", () => drawDifferences(section, pairs));
    }
  };

  const compare = (one, other) => {
    if (one === "" || other === "") return (one === "") - (other === "");
    const numbers = [Number(one), Number(other)];
    return numbers.some(Number.isNaN) ? one.localeCompare(other) : numbers[0] - numbers[1];
  };

  // A first click sorts rising, a second one falling; what has no value stays at the end.
  const sort = (heading) => {
    const table = heading.closest("table");
    const falling = heading.getAttribute("aria-sort") === "ascending";
    const value = (row) => row.cells[heading.cellIndex].dataset.value;
    const rows = [...table.tBodies[0].rows].sort((one, other) => {
      const empty = value(one) === "" || value(other) === "";
      return compare(value(one), value(other)) * (falling && !empty ? -1 : 1);
    });
    table.tBodies[0].append(...rows);
    for (const each of table.querySelectorAll("th")) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
  };

  for (const button of document.querySelectorAll(".sortable th button")) {
    button.addEventListener("click", () => sort(button.closest("th")));
  }
  for (const box of document.querySelectorAll(".all-columns")) {
    box.addEventListener("change", () => box.closest("section").querySelector(".rows").classList.toggle("wide", box.checked));
  }
  fillReferences();
  draw();
  dark.addEventListener("change", draw);
  // Another width is another legend; a phone also resizes in height, whenever its address bar comes and goes.
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    draw();
  });
})();
