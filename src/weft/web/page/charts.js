// Charts of dashboards and reports: `weftCharts.draw(element, spec)`. A spec is plain data, so that Python can write it.
//   {kind: "lines", x_name, y_name, series: [{name, points: [[x, y], …]}]}
//   {kind: "bars", unit, rows: [name, …], series: [{name, values: [number, …]}]}
//   {kind: "timeline", unit, bars: [{row, name, start, end, note, is_critical}]}
//   {kind: "matrix", unit, x_name, y_name, columns, rows, cells: [[column, row, value], …]}
"use strict";

const weftCharts = (() => {
  const COLOURS = ["--blue", "--orange", "--green", "--violet", "--sky", "--red"];
  const STAGES = {
    send: "--blue", write: "--blue", receive: "--sky", verify: "--green", commit: "--orange", pause: "--violet",
    convert: "--violet", delta: "--green", amax: "--orange", h2d: "--sky",
  };
  const MIN_ROW = 5, ROOMY_ROW = 20;
  const drawn = new Map();

  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = value => Number.isInteger(value) || Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : Number(value).toPrecision(3);
  const stage = (bar, rank) => colour(STAGES[bar.group ?? bar.name] ?? (bar.name.includes("wait") ? "--grey" : COLOURS[rank % COLOURS.length]));
  const text = value => String(value).replace(/[&<>"]/g, found => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}[found]));

  function base() {
    const ink = colour("--ink"), soft = colour("--soft");
    return {
      animation: false,
      textStyle: {color: ink, fontFamily: "system-ui, sans-serif"},
      color: COLOURS.map(colour),
      legend: {textStyle: {color: ink}, type: "scroll", top: 0, icon: "roundRect"},
      tooltip: {confine: true, backgroundColor: colour("--card"), borderColor: colour("--line"), textStyle: {color: ink}},
      grid: {left: 8, right: 18, top: 34, bottom: 8, containLabel: true},
      axis: {axisLabel: {color: soft}, nameTextStyle: {color: soft}, axisLine: {lineStyle: {color: colour("--line")}},
        splitLine: {lineStyle: {color: colour("--line"), opacity: .6}}},
    };
  }

  function lines(spec) {
    const {axis, ...rest} = base();
    return {...rest,
      legend: {...rest.legend, show: spec.series.length > 1},
      grid: {...rest.grid, right: 30, bottom: 26},
      tooltip: {...rest.tooltip, trigger: "axis", valueFormatter: number},
      xAxis: {...axis, type: "value", name: spec.x_name, nameLocation: "middle", nameGap: 24, scale: true, minInterval: 1, splitLine: {show: false}},
      yAxis: {...axis, type: "value", name: spec.y_name, min: 0},
      series: spec.series.map(each => ({type: "line", name: each.name, data: each.points, symbolSize: 5,
        showSymbol: each.points.length < 60, lineStyle: {width: 2, type: each.is_dashed ? "dashed" : "solid"}})),
    };
  }

  function bars(spec) {
    const {axis, ...rest} = base();
    return {...rest,
      legend: {...rest.legend, show: spec.series.length > 1},
      tooltip: {...rest.tooltip, trigger: "axis", axisPointer: {type: "shadow"}, valueFormatter: value => value == null ? "–" : `${number(value)} ${spec.unit}`},
      xAxis: {...axis, type: "value", name: spec.unit, nameLocation: "end"},
      yAxis: {...axis, type: "category", data: spec.rows, inverse: true, axisLabel: {...axis.axisLabel, width: 300, overflow: "truncate"}},
      series: spec.series.map(each => ({type: "bar", name: each.name, data: each.values, barMaxWidth: 16})),
    };
  }

  function timeline(spec) {
    const {axis, ...rest} = base();
    const rows = [...new Set(spec.bars.map(bar => bar.row))], names = [...new Set(spec.bars.map(bar => bar.name))];
    const red = colour("--red");
    const item = bars => (params, api) => {
      const bar = bars[params.dataIndex], [x, y] = api.coord([bar.start, rows.indexOf(bar.row)]);
      const [end] = api.coord([bar.end, 0]), height = Math.max(api.size([0, 1])[1] * .72, 1.5);
      const shape = echarts.graphic.clipRectByRect({x, y: y - height / 2, width: Math.max(end - x, 1.5), height}, params.coordSys);
      return shape && {type: "rect", shape, style: {fill: stage(bar, names.indexOf(bar.name)), opacity: bar.is_waiting ? .35 : .95,
        stroke: bar.is_critical ? red : "none", lineWidth: bar.is_critical ? 2 : 0}};
    };
    const zooms = rows.length > 45 ? [{type: "slider", yAxisIndex: 0, width: 12, right: 2}] : [];
    const byName = names.map(name => spec.bars.filter(bar => bar.name === name));
    return {...rest,
      grid: {...rest.grid, top: 30, right: rows.length > 45 ? 30 : 18, bottom: 26},
      tooltip: {...rest.tooltip, formatter: ({seriesIndex, dataIndex}) => {
        const bar = byName[seriesIndex][dataIndex];
        const note = bar.note ? `<br>${text(bar.note)}` : "";
        return `<b>${text(bar.row)}</b>: ${text(bar.name)}<br>${number(bar.start)} – ${number(bar.end)} ${spec.unit} (${number(bar.end - bar.start)} ${spec.unit})${note}`;
      }},
      dataZoom: [{type: "inside", xAxisIndex: 0}, ...zooms],
      xAxis: {...axis, type: "value", name: spec.unit, nameLocation: "middle", nameGap: 24, min: Math.min(0, ...spec.bars.map(bar => bar.start))},
      yAxis: {...axis, type: "category", data: rows, inverse: true, splitLine: {show: false}, axisTick: {show: false}},
      series: byName.map((bars, rank) => ({type: "custom", name: names[rank], renderItem: item(bars), encode: {x: [1, 2], y: 0},
        clip: true, itemStyle: {color: stage(bars[0], rank)}, data: bars.map(bar => [rows.indexOf(bar.row), bar.start, bar.end])})),
    };
  }

  function matrix(spec) {
    const {axis, ...rest} = base();
    const most = Math.max(...spec.cells.map(cell => cell[2]), 0);
    return {...rest, legend: {show: false},
      grid: {...rest.grid, left: 30, top: 8, bottom: 60},
      tooltip: {...rest.tooltip, formatter: ({data}) => `${text(spec.y_name)} ${text(spec.rows[data[1]])} → ${text(spec.x_name)} ${text(spec.columns[data[0]])}<br><b>${number(data[2])} ${spec.unit}</b>${data[3] ? "<br>" + text(data[3]) : ""}`},
      xAxis: {...axis, type: "category", data: spec.columns, name: spec.x_name, nameLocation: "middle", nameGap: 24, splitArea: {show: false}},
      yAxis: {...axis, type: "category", data: spec.rows, name: spec.y_name, nameLocation: "middle", nameGap: 34, inverse: true,
        axisLabel: {...axis.axisLabel, interval: Math.ceil(spec.rows.length / 16) - 1}},
      visualMap: {dimension: 2, min: 0, max: most || 1, calculable: false, orient: "horizontal", left: "center", bottom: 0, itemHeight: 140, itemWidth: 10,
        textStyle: {color: colour("--soft")}, text: [`${number(most)} ${spec.unit}`, "0"], inRange: {color: [colour("--low"), colour("--high")]}},
      series: [{type: "heatmap", data: spec.cells, progressive: 4000, itemStyle: {borderWidth: spec.cells.length < 400 ? 1 : 0, borderColor: colour("--card")}, emphasis: {itemStyle: {borderColor: colour("--ink"), borderWidth: 1}}}],
    };
  }

  const kinds = {lines, bars, timeline, matrix};

  function fit(element, spec) {
    if (spec.kind !== "timeline" && spec.kind !== "bars") return;
    const rows = spec.kind === "bars" ? spec.rows.length * spec.series.length * 1.3 : new Set(spec.bars.map(bar => bar.row)).size;
    const wanted = rows <= 45 ? rows * ROOMY_ROW : Math.max(45 * ROOMY_ROW, Math.min(rows * MIN_ROW, 2600));
    element.style.height = `${Math.max(wanted + 70, 140)}px`;
  }

  function draw(element, spec) {
    fit(element, spec);
    let known = drawn.get(element);
    if (!known) {
      known = {chart: echarts.init(element, null, {renderer: "canvas"})};
      drawn.set(element, known);
    }
    known.spec = spec;
    known.chart.resize();
    known.chart.setOption(kinds[spec.kind](spec), {notMerge: true});
    return known.chart;
  }

  function redraw() { for (const [element, known] of drawn) draw(element, known.spec); }

  function save(element, format, name) {
    const known = drawn.get(element);
    if (!known) return;
    let address;
    if (format === "png") {
      address = known.chart.getDataURL({type: "png", pixelRatio: 2, backgroundColor: colour("--card")});
    } else {
      const apart = echarts.init(null, null, {renderer: "svg", ssr: true, width: element.clientWidth, height: element.clientHeight});
      apart.setOption(kinds[known.spec.kind](known.spec));
      address = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(apart.renderToSVGString());
      apart.dispose();
    }
    const link = document.createElement("a");
    link.href = address;
    link.download = `${name}.${format}`;
    link.click();
  }

  function addButtons(bar, element, name) {
    for (const format of ["png", "svg"]) {
      const button = document.createElement("button");
      button.textContent = format.toUpperCase();
      button.title = `Save this chart as ${format.toUpperCase()}`;
      button.onclick = () => save(element, format, name);
      if (format === "png") button.classList.add("end");
      bar.append(button);
    }
  }

  function useTheme(wanted) {
    const dark = wanted ? wanted === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    redraw();
  }

  function toggleTheme() { useTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => useTheme());
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 120); });
  return {draw, redraw, addButtons, useTheme, toggleTheme, text, number};
})();
