"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const views = new Map();

  // A column of text holds each word once, and its place for every row.
  const unpacked = (columns) => {
    const values = Object.entries(columns).map(([name, column]) => [
      name,
      Array.isArray(column) ? column : column.codes.map((code) => column.levels[code]),
    ]);
    const [[, first] = [null, []]] = values;
    return first.map((_, row) => Object.fromEntries(values.map(([name, all]) => [name, all[row]])));
  };

  const read = (figure) => {
    const found = JSON.parse(figure.querySelector("script").textContent);
    const sets = Object.entries(found.data).map(([name, columns]) => [name, unpacked(columns)]);
    return { ...found, datasets: Object.fromEntries(sets) };
  };

  const look = () => {
    const style = getComputedStyle(document.documentElement);
    const names = ["--ink", "--muted", "--rule", "--font"];
    const [ink, muted, rule, font] = names.map((name) => style.getPropertyValue(name).trim());
    const colours = { labelColor: muted, titleColor: muted, tickColor: rule, domainColor: rule, gridColor: rule };
    const sizes = { labelFontSize: 11, titleFontSize: 11, labelLimit: narrow.matches ? 110 : 220 };
    return {
      background: "transparent",
      font,
      text: { color: ink, fontSize: 11 },
      rule: { color: ink },
      axisY: { minExtent: 34 },
      axis: { ...colours, ...sizes, titleFontWeight: "normal" },
      legend: {
        orient: "bottom", columns: narrow.matches ? 1 : 2, labelColor: ink, labelFontSize: 12, labelLimit: 300,
        symbolSize: 90, symbolStrokeWidth: 2, offset: 12, gradientLength: 200, gradientThickness: 10,
      },
      line: { strokeWidth: 2 },
      point: { filled: true, size: 55, opacity: 1 },
      view: { stroke: null },
    };
  };

  const draw = async (figure) => {
    const found = read(figure);
    // Black lines would be lost on a dark page; what is black in a map of layers is no list's member, and stays.
    const lightened = (key, value) => (Array.isArray(value) ? value.map((each) => (each === "#000000" ? "#FFFFFF" : each)) : value);
    const spec = dark.matches ? JSON.parse(JSON.stringify(found.spec), lightened) : found.spec;
    const canvas = figure.querySelector(".canvas");
    views.get(figure)?.finalize();
    const whole = {
      width: "container",
      autosize: { type: "fit-x", contains: "padding" },
      description: found.label,
      datasets: found.datasets,
      ...spec,
    };
    views.set(figure, await vegaEmbed(canvas, whole, {
      mode: "vega-lite", renderer: "svg", actions: false, ast: true, config: look(),
      tooltip: { theme: dark.matches ? "dark" : "light" },
    }));
    canvas.style.minHeight = "";
    figure.dataset.drawn = "";
  };

  const cell = (kind, text) => Object.assign(document.createElement(kind), { textContent: text ?? "" });

  const listed = (figure, details, DataTable) => {
    const { label, datasets } = read(figure);
    for (const rows of Object.values(datasets)) {
      const table = document.createElement("table");
      const names = Object.keys(rows[0] ?? {});
      const head = table.createTHead().insertRow();
      for (const name of names) {
        const title = Object.assign(cell("th", name), { scope: "col" });
        title.dataset.type = rows.every((row) => row[name] === null || typeof row[name] === "number") ? "num" : "html";
        head.append(title);
      }
      const body = table.createTBody();
      for (const row of rows) body.insertRow().append(...names.map((name) => cell("td", row[name])));
      table.className = "grid";
      const around = Object.assign(document.createElement("div"), { className: "scroll", tabIndex: 0 });
      around.setAttribute("role", "region");
      around.setAttribute("aria-label", `Values of ${label}`);
      around.append(table);
      details.append(around);
      sortable(table, DataTable);
    }
  };

  const sortable = (table, DataTable) => {
    // Each column's type stands at its title.
    const layout = { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null };
    const made = new DataTable(table, { paging: false, info: false, autoWidth: false, order: [], layout });
    if (table.dataset.filter !== undefined) filters(table, made, Number(table.dataset.filter));
  };

  const labelled = (text, control) => {
    const label = cell("label", `${text} `);
    label.append(control);
    return label;
  };

  const filters = (table, made, column) => {
    const name = table.tHead.rows[0].cells[column].textContent;
    const search = Object.assign(document.createElement("input"), { type: "search" });
    const choice = document.createElement("select");
    const values = [...new Set([...table.tBodies[0].rows].map((row) => row.cells[column].textContent))];
    choice.append(new Option("all", ""), ...values.map((value) => new Option(value, value)));
    const told = Object.assign(document.createElement("output"), { className: "told" });
    const filter = () => {
      made.search(search.value);
      made.column(column).search(choice.value, { exact: choice.value !== "" }).draw();
      told.textContent = `${made.rows({ search: "applied" }).count()} of ${made.rows().count()} rows`;
    };
    search.addEventListener("input", filter);
    choice.addEventListener("change", filter);
    filter();
    const tools = Object.assign(document.createElement("div"), { className: "tools" });
    tools.append(labelled("Search", search), labelled(name, choice), told);
    table.closest(".scroll").before(tools);
  };

  const library = async () => {
    const source = document.getElementById("tables-library").textContent;
    const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    const { default: DataTable } = await import(address);
    URL.revokeObjectURL(address);
    return DataTable;
  };

  const start = async () => {
    const near = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) {
        if (isIntersecting) {
          near.unobserve(target);
          draw(target);
        }
      }
    }, { rootMargin: "400px" });
    document.querySelectorAll("figure.plot").forEach((figure) => near.observe(figure));
    const again = () => views.forEach((_, figure) => draw(figure));
    dark.addEventListener("change", again);
    narrow.addEventListener("change", again);
    document.querySelector(".skip").addEventListener("click", (event) => {
      // To the address #main a run's page would give way.
      event.preventDefault();
      document.getElementById("main").focus();
    });

    const DataTable = await library();
    // What is not shown has no widths, and can wait.
    const prepare = () => document.querySelectorAll("table.sortable:not([data-ready])").forEach((table) => {
      if (table.offsetParent === null) return;
      table.dataset.ready = "";
      sortable(table, DataTable);
    });
    prepare();
    addEventListener("hashchange", prepare);
    document.querySelectorAll("details.values").forEach((details) => {
      details.addEventListener("toggle", () => listed(details.closest("figure"), details, DataTable), { once: true });
    });
    document.documentElement.dataset.ready = "";
  };

  start();
})();
